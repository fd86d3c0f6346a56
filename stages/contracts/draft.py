"""The draft's record: what a checkpoint was trained on, in terms no engine can misread."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from stages.contracts.files import Fact
from stages.contracts.manifest import CaptureSpec, TargetIdentity

DRAFT = Path("models/draft")
DRAFT_RECORD = "draft_record.json"


class DraftRecord(Fact):
    """models/draft/draft_record.json; its digest is the draft's name everywhere else."""

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

    @property
    def points(self) -> tuple[int, ...]:
        return self.capture.points
