"""speculators 0.3-0.4: data_{i}.pt, flat or wrapped in rows_{a}-{b}/; no current trainer of its own reads it.

A sample (torch.save): input_ids i64 [L], loss_mask i64 [L], hidden_states = list of 4 x [L, H], ascending points, [3] the
last before the final norm. data_config.json ("version": "2.0") and sample_lengths.json are written only when a run ends.
"""

from __future__ import annotations

import re

from stages.bridges.kinds import Look, StoreKind

SAMPLE = re.compile(r"data_(?P<index>\d+)\.pt")
SIDE_FILES = frozenset({"data_config.json", "sample_lengths.json", "token_freq.pt", "d2t.npy", "t2d.npy"})
_KEYS = {"input_ids", "hidden_states"}
_OTHERS = {"aux_hidden_state", "aux_hidden_states", "target_hiddens", "conversation_id"}


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE):
        return None
    keys = look.names.keys
    if keys and not (keys >= _KEYS and not keys & _OTHERS):
        return None
    written = look.config is not None and "layer_ids" in (look.config.get("hidden_states") or {})
    return StoreKind(
        tool="speculators",
        era="0.3-0.4",
        dialect="speculators_legacy" if written else None,
        last_state="before_final_norm",
        pattern="rows_{a}-{b}/data_{i}.pt" if look.nested else "data_{i}.pt",
        numbering="speculators_legacy",
    )
