"""speculators 0.3-0.4: data_{i}.pt, flat or wrapped in rows_{a}-{b}/; no current trainer of its own reads it.

A sample (torch.save): input_ids i64 [L], loss_mask i64 [L], hidden_states = list of 4 x [L, H], ascending points, [3] the
last before the final norm. data_config.json ("version": "2.0") and sample_lengths.json are written only when a run ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.bridges.kinds import ForeignRow, Look, StoreFile, StoreKind

SAMPLE = re.compile(r"data_(?P<index>\d+)\.pt")
SIDE_FILES = frozenset(
    {"data_config.json", "sample_lengths.json", "token_freq.pt", "d2t.npy", "t2d.npy", "mended_masks.json"}
)
CONFIG = "data_config.json"
_AUX = 3
_KEYS = {"input_ids", "hidden_states"}
_OLDER = {"hidden_state", "target"}
_OTHERS = {"aux_hidden_state", "aux_hidden_states", "target_hiddens", "conversation_id"}


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE):
        return None
    keys = look.names.keys
    if keys and not keys >= _OLDER and (not keys >= _KEYS or keys & _OTHERS):
        return None
    written = look.config is not None and layer_ids(look.config) is not None
    return StoreKind(
        tool="speculators",
        era="0.3-0.4",
        dialect="speculators_legacy" if written else None,
        last_state="before_final_norm",
        pattern="rows_{a}-{b}/data_{i}.pt" if look.nested else "data_{i}.pt",
        numbering="speculators_legacy",
    )


def read(sample: dict[str, Any], file: StoreFile, path: Path) -> Iterator[ForeignRow]:
    """The one row of data_{i}.pt. A list of three states has no last one: with three ids its tool captures none, and its
    reader then takes the third for it.

    Raises:
        DataError: an older schema, no list of three states or more, or parts that do not fit each other.
    """
    from stages.bridges._open import damaged
    from stages.bridges._rows import demand_keys, make_row, states

    demand_keys(sample, ("input_ids", "hidden_states"), path, {"target": "v0, with hidden_state and target"})
    listed = sample["hidden_states"]
    if not isinstance(listed, list | tuple) or len(listed) < _AUX:
        got = f"{len(listed)} states" if isinstance(listed, list | tuple) else f"a {type(listed).__name__}"
        raise damaged(path, "hidden_states is no list of states", expected="three auxiliary ones and the last", got=got)
    slots = [states(s, f"hidden_states[{i}]", path) for i, s in enumerate(listed)]
    aux, last = (slots, None) if len(slots) == _AUX else (slots[:-1], slots[-1])
    ids, mask = sample["input_ids"], sample.get("loss_mask")
    assert file.index is not None
    yield make_row(file.index, file.path, path, ids=ids, mask=mask, aux=aux, last=last)


def write_with_mask(path: Path, mask: bytes, to: Path) -> None:
    """Write the sample at `path` to `to` with another loss mask, a byte a token; everything else as it stands.

    Raises:
        DataError: no sample that can be opened.
    """
    import torch

    from stages.bridges._open import sample

    with sample(path) as opened:
        old = opened["loss_mask"]
        new = torch.frombuffer(bytearray(mask), dtype=torch.uint8).to(old.dtype)
        torch.save({**opened, "loss_mask": new.view(*old.shape[:-1], -1)}, to)


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    told = config.get("hidden_states")
    ids = told.get("layer_ids") if isinstance(told, dict) else None
    return ids if isinstance(ids, list) and all(type(i) is int for i in ids) else None
