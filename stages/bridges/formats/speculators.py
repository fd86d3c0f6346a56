"""speculators from 0.5 on: flat hs_{i}.safetensors.

A sample: hidden_states bf16 [L, 4, H], slot 3 before the final norm; token_ids i64 [L]. Masks live in an Arrow data set.
"""

from __future__ import annotations

import re

from stages.bridges.kinds import Look, StoreKind

SAMPLE = re.compile(r"hs_(?P<index>\d+)\.safetensors")
SIDE_FILES = frozenset({"data_config.json", "sample_lengths.json", "token_freq.pt"})


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE):
        return None
    if look.names.keys and not look.names.keys >= {"hidden_states", "token_ids"}:
        return None
    written = look.config is not None and "layer_ids" in (look.config.get("hidden_states") or {})
    dialect = "speculators" if written else None
    return StoreKind("speculators", ">=0.5", dialect, "before_final_norm", "hs_{i}.safetensors", "speculators")
