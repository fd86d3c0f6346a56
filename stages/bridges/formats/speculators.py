"""speculators from 0.5 on: flat hs_{i}.safetensors.

A sample: hidden_states bf16 [L, 4, H], slot 3 before the final norm; token_ids i64 [L]. Masks live in an Arrow data set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.bridges._open import damaged
from stages.bridges._rows import demand_keys, make_row, states
from stages.bridges.kinds import ForeignRow, Look, StoreFile, StoreKind

SAMPLE = re.compile(r"hs_(?P<index>\d+)\.safetensors")
_SLOTS = 4
SIDE_FILES = frozenset({"data_config.json", "sample_lengths.json", "token_freq.pt"})
CONFIG = "data_config.json"


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE):
        return None
    if look.names.keys and not look.names.keys >= {"hidden_states", "token_ids"}:
        return None
    written = look.config is not None and "layer_ids" in (look.config.get("hidden_states") or {})
    dialect = "speculators" if written else None
    return StoreKind("speculators", ">=0.5", dialect, "before_final_norm", "hs_{i}.safetensors", "speculators")


def read(sample: dict[str, Any], file: StoreFile, path: Path) -> Iterator[ForeignRow]:
    """The one row of hs_{i}.safetensors, without a mask.

    Raises:
        DataError: a part is missing, or parts do not fit each other.
    """
    demand_keys(sample, ("hidden_states", "token_ids"), path)
    stacked = states(sample["hidden_states"], "hidden_states", path, dims=3)
    if stacked.shape[1] < _SLOTS:
        got = f"{stacked.shape[1]} states"
        raise damaged(path, "A sample lacks a state", expected="three auxiliary ones and the last", got=got)
    *aux, last = stacked.unbind(1)
    assert file.index is not None
    yield make_row(file.index, file.path, path, ids=sample["token_ids"], mask=None, aux=aux, last=last)


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    ids = (config.get("hidden_states") or {}).get("layer_ids")
    return [int(i) for i in ids] if isinstance(ids, list) else None
