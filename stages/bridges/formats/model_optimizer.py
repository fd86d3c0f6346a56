"""Model-Optimizer: flat {conversation_id}.pt.

A sample (torch.save): input_ids [L], hidden_states [L, H] (the last), aux_hidden_states [L, 3H], loss_mask [L],
conversation_id. The last is after the final norm from its transformers backend and before it from its vLLM dump, and the
file does not say which.
"""

from __future__ import annotations

import re

from stages.bridges.kinds import Look, StoreKind

SAMPLE = re.compile(r"(?P<index>.+)\.pt")
SIDE_FILES: frozenset[str] = frozenset()


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE) or "aux_hidden_states" not in look.names.keys:
        return None
    return StoreKind("model_optimizer", "any", None, "unknown", "{conversation_id}.pt", "model_optimizer")
