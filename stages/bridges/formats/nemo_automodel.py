"""NeMo Automodel: manifest.json (format_version 2) and shard-{k}.safetensors of 256 rows, padded to one length S.

A shard: input_ids, attention_mask, loss_mask i64 [n, S]; aux_hidden_states [n, S, 3H]; position_mask bool [n, S, 1];
target_probs [n, S, D], or target_probs_values and target_probs_indices [n, S, k]. No last state: its soft targets instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.bridges._names import read_json
from stages.bridges.kinds import ForeignRow, Look, StoreFile, StoreKind

SAMPLE = re.compile(r"shard-(?P<index>\d+)\.safetensors")
_AUX = 3
SIDE_FILES = frozenset({"manifest.json", "target_embeddings.safetensors"})
CONFIG = "manifest.json"


def recognise(look: Look) -> StoreKind | None:
    manifest = read_json(look.root / "manifest.json")
    shards = look.fits(SAMPLE)
    if not shards and (manifest is None or "format_version" not in manifest):
        return None
    if shards and look.names.keys and "aux_hidden_states" not in look.names.keys:
        return None
    return StoreKind("nemo_automodel", "any", None, "unknown", "manifest.json, shard-{k}.safetensors", "nemo_automodel")


def read(sample: dict[str, Any], file: StoreFile, path: Path) -> Iterator[ForeignRow]:
    """Rows of a shard, each without its padding and without a last state.

    Raises:
        DataError: a part is missing, or parts do not fit each other.
    """
    from stages.bridges._open import damaged
    from stages.bridges._rows import demand_keys, make_row, split, states, tensor

    demand_keys(sample, ("input_ids", "attention_mask", "loss_mask", "aux_hidden_states"), path)
    ids, there, mask = (tensor(sample[k], k, path, 2) for k in ("input_ids", "attention_mask", "loss_mask"))
    aux = states(sample["aux_hidden_states"], "aux_hidden_states", path, dims=3)
    if not len(ids) == len(there) == len(mask) == len(aux):
        got = str([len(x) for x in (ids, there, mask, aux)])
        raise damaged(path, "The parts of a shard have different numbers of rows", got=got)
    for i in range(len(ids)):
        at = there[i].nonzero()[:, 0]
        begin, end = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)
        if end - begin != len(at):
            raise damaged(path, "The attention mask of a row has holes", got=f"row {i}: {len(at)} of {end - begin}")
        part = slice(begin, end)
        row_aux = split(aux[i][part], _AUX, "aux_hidden_states", path)
        yield make_row(
            f"{file.index}:{i}", file.path, path, ids=ids[i][part], mask=mask[i][part], aux=row_aux, last=None
        )


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    ids = config.get("aux_layer_ids")
    return [int(i) for i in ids] if isinstance(ids, list) else None
