"""Model-Optimizer: flat {conversation_id}.pt.

A sample (torch.save): input_ids [L], hidden_states [L, H] (the last), aux_hidden_states [L, 3H], loss_mask [L],
conversation_id. The last is after the final norm from its transformers backend and before it from its vLLM dump; only
newer files say which, in `hidden_states_prenorm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.bridges.kinds import ForeignRow, Look, StoreFile, StoreKind

SAMPLE = re.compile(r"(?P<index>.+)\.pt")
SIDE_FILES: frozenset[str] = frozenset()
CONFIG = ""


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE) or "aux_hidden_states" not in look.names.keys:
        return None
    return StoreKind("model_optimizer", "any", None, "unknown", "{conversation_id}.pt", "model_optimizer")


def read(sample: dict[str, Any], file: StoreFile, path: Path) -> Iterator[ForeignRow]:
    """The one row of {conversation_id}.pt; `hidden_states_prenorm`, where there is one, says where the last state stands.

    Raises:
        DataError: a part is missing, or parts do not fit each other.
    """
    from stages.bridges._rows import demand_keys, make_row, split, states

    demand_keys(sample, ("input_ids", "hidden_states", "aux_hidden_states"), path)
    last = states(sample["hidden_states"], "hidden_states", path)
    aux = states(sample["aux_hidden_states"], "aux_hidden_states", path)
    parts = split(aux, max(aux.shape[-1] // max(last.shape[-1], 1), 1), "aux_hidden_states", path)
    index = str(sample.get("conversation_id", file.index))
    row = make_row(index, file.path, path, ids=sample["input_ids"], mask=sample.get("loss_mask"), aux=parts, last=last)
    before = sample.get("hidden_states_prenorm")
    if isinstance(before, bool):
        row = replace(row, last_state="before_final_norm" if before else "after_final_norm")
    yield row


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    """Nothing beside the samples says which layers they are of."""
    return None
