"""What an engine would not say of a draft: whether it fits this very target, and computes what was trained.

`read_draft` has looked at names, shapes and the vocabulary before; this compares with the target. SGLang takes the target's
embedding whatever the file carries, builds whatever layer config.json describes, and leaves at random what the file lacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.contracts.draft import read_draft_config
from stages.contracts.errors import EngineError
from stages.drafts._export import CONFIG, EMBEDDING, DraftCheckpoint

# Keys that change what SGLang computes, and the only value this project's draft computes.
_AS_TRAINED: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "bias": (None, False),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "num_aux_hidden_states": (None, 3),
}


def audit_for_target(
    folder: Path, checkpoint: DraftCheckpoint, *, hidden_size: int, vocab_size: int, embedding: Tensor | None
) -> None:
    """Refuse a draft that this target's engine would run otherwise than it was trained.

    Args:
        hidden_size, vocab_size: of the target.
        embedding: the target's [V, H]; None when it is not at hand, and then a draft must not bring its own.

    Raises:
        EngineError: all faults at once.
    """
    raw = read_draft_config(folder / CONFIG)
    faults = _shape_faults(checkpoint, hidden_size, vocab_size) + _config_faults(raw)
    faults += _embedding_faults(checkpoint.tensors.get(EMBEDDING), embedding)
    if faults:
        raise EngineError(
            "The draft does not fit the target it is to be served with",
            where=str(folder),
            expected="shapes of the target, its embedding or none, and the computation that was trained",
            got="\n    " + "\n    ".join(faults),
            do="export the draft for this target again: `dvc repro train`",
        )


def _shape_faults(checkpoint: DraftCheckpoint, hidden_size: int, vocab_size: int) -> list[str]:
    c = checkpoint.config
    pairs = (("hidden_size", c.hidden_size, hidden_size), ("vocab_size", c.vocab_size, vocab_size))
    return [f"{name} {got}: the target has {wanted}" for name, got, wanted in pairs if got != wanted]


def _config_faults(raw: dict[str, Any]) -> list[str]:
    eagle = raw.get("eagle_config") or {}
    faults = [
        f"{name} is {value!r}: the draft was trained without"
        for name, allowed in _AS_TRAINED.items()
        for value in (raw.get(name), eagle.get(name))
        if value not in allowed
    ]
    width = raw.get("target_hidden_size")
    if width not in (None, raw.get("hidden_size")):
        faults.append(f"target_hidden_size is {width!r}: the draft takes states of its own hidden_size")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        faults.append(f"RoPE scaling {kind!r}: the draft was trained with plain rotary positions")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta != raw.get("rope_theta"):
        faults.append(f"rope_parameters.rope_theta {theta} is not rope_theta {raw.get('rope_theta')}")
    return faults


def _embedding_faults(own: Tensor | None, target: Tensor | None) -> list[str]:
    if own is None:
        return []
    if target is None:
        return [f"{EMBEDDING} is there: the engine takes the target's, and whether they are equal cannot be told here"]
    if own.shape == target.shape and torch.equal(own.to(target.dtype), target.to(own.device)):
        return []
    return [f"{EMBEDDING} is not the target's: the engine takes the target's in its place"]
