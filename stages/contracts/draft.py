"""The draft's record: what a checkpoint was trained on, in terms no engine can misread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from stages.contracts.errors import DataError
from stages.contracts.files import Fact
from stages.contracts.manifest import CaptureSpec, TargetIdentity

DRAFT = Path("models/draft")
DRAFT_RECORD = "draft_record.json"

# What EAGLE-3.1 adds to EAGLE-3, by the names that SGLang, vLLM and speculators have for it in config.json; stages/drafts/_module.py
# says what each computes.
DraftNorm = Literal["fc_norm", "norm_before_fc", "norm_output"]
NORMS: tuple[DraftNorm, ...] = get_args(DraftNorm)


class DraftStart(Fact):
    """The draft that training went on from. draft_digest: of its record; weights_digest: of its tensors' file.

    vocabulary: `keep` has that draft's ids, `rebuild` those of the merged set; ids_kept and ids_new: of this draft's ids,
    those that it had already and those that start from the target's own head; ids_of_merged: of the merged set's ids,
    those that this draft can say; coverage_train: share of supervised training tokens that it can say.
    """

    draft_digest: str
    weights_digest: str
    vocabulary: Literal["keep", "rebuild"]
    ids_kept: int
    ids_new: int
    ids_of_merged: int
    coverage_train: float


class DraftRecord(Fact):
    """models/draft/draft_record.json; its digest is the draft's name everywhere else. norms: those it was trained with,
    if any. start: none when training started from the target; nothing is said of it then."""

    version: Literal[1] = 1
    algorithm: Literal["eagle3"] = "eagle3"
    target: TargetIdentity
    capture: CaptureSpec
    merged_digest: str
    gate_training_digest: str
    params_digest: str
    steps_ahead: int
    draft_vocab_size: int
    optimizer_steps: int
    supervised_tokens_seen: int
    exported_for: str
    layer_ids: tuple[int, ...]
    weights_digest: str
    config_digest: str
    norms: tuple[DraftNorm, ...] = Field(default=(), exclude_if=lambda norms: not norms)
    start: DraftStart | None = Field(default=None, exclude_if=lambda start: start is None)

    @property
    def points(self) -> tuple[int, ...]:
        return self.capture.points


def norms_of(raw: dict[str, Any]) -> tuple[DraftNorm, ...]:
    """The norms that engines make of a draft's config.json: each key where they look for it, and nowhere else.

    Sources: SGLang 0.5.23, models/llama_eagle3.py (`use_aux_norm` is its old name for fc_norm); vLLM's of the same name.
    """
    eagle: dict[str, Any] = raw.get("eagle_config") or {}
    said = {
        "fc_norm": raw.get("fc_norm") or raw.get("use_aux_norm"),
        "norm_before_fc": eagle.get("norm_before_fc", raw.get("norm_before_fc")),
        "norm_output": raw.get("norm_output"),
    }
    return tuple(name for name in NORMS if said[name])


def read_draft_config(path: Path) -> dict[str, Any]:
    """config.json of a draft, as far as its shape goes: an object, `eagle_config` too, layer ids a list of whole numbers.

    Raises:
        DataError: missing, no JSON, or of another shape.
    """
    raw: dict[str, Any] = {}
    try:
        told: Any = json.loads(path.read_text(encoding="utf-8"))
        got = _odd_shape(told) if hasattr(told, "get") else f"a {type(told).__name__}"
        raw = told
    except (OSError, ValueError, RecursionError) as error:  # ValueError: bytes that are no UTF-8, or no JSON
        got = str(error)
    if got:
        raise DataError(
            "The draft's config.json cannot be read",
            where=str(path),
            expected="a JSON object whose eagle_config.eagle_aux_hidden_state_layer_ids is a list of whole numbers",
            got=got,
            do="export the draft again: `dvc repro train`",
        )
    return raw


def _odd_shape(raw: dict[str, Any]) -> str:
    """What of eagle_config has another shape, or nothing."""
    eagle: Any = raw.get("eagle_config") or {}
    if not hasattr(eagle, "get"):
        return f"eagle_config {eagle!r}"
    ids: Any = eagle.get("eagle_aux_hidden_state_layer_ids")
    whole = ids is None or (hasattr(ids, "append") and all(map(_is_whole, ids)))
    return "" if whole else f"eagle_aux_hidden_state_layer_ids {ids!r}"


def _is_whole(value: Any) -> bool:
    return type(value) is int
