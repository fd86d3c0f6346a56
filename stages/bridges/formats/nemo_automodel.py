"""NeMo Automodel: manifest.json (format_version 2) and shard-{k}.safetensors of 256 rows, padded to one length S.

A shard: input_ids, attention_mask, loss_mask i64 [n, S]; aux_hidden_states [n, S, 3H]; position_mask bool [n, S, 1];
target_probs [n, S, D], or target_probs_values and target_probs_indices [n, S, k]. No last state: its soft targets instead.
"""

from __future__ import annotations

import re

from stages.bridges._names import read_json
from stages.bridges.kinds import Look, StoreKind

SAMPLE = re.compile(r"shard-(?P<index>\d+)\.safetensors")
SIDE_FILES = frozenset({"manifest.json"})


def recognise(look: Look) -> StoreKind | None:
    manifest = read_json(look.root / "manifest.json")
    shards = look.fits(SAMPLE)
    if not shards and (manifest is None or "format_version" not in manifest):
        return None
    if shards and look.names.keys and "aux_hidden_states" not in look.names.keys:
        return None
    return StoreKind("nemo_automodel", "any", None, "unknown", "manifest.json, shard-{k}.safetensors", "nemo_automodel")
