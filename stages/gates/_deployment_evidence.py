"""What gate-deployment looks at, and which stage renews it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.contracts.draft import DraftRecord
from stages.contracts.evidence import BenchmarkEvidence, ServeEvidence, ServingPolicy, TrainMetrics
from stages.contracts.manifest import TargetIdentity
from stages.contracts.release import ReleaseRecord
from stages.contracts.report import GateReport

if TYPE_CHECKING:
    from pandas import DataFrame

TRAIN = "run `dvc repro train`"
SERVE = "run `dvc repro serve-validate`"
BENCHMARK = "run `dvc repro benchmark`"


@dataclass(frozen=True)
class Evidence:
    """What the gate looks at, as plain values.

    Args:
        record: models/draft/draft_record.json.
        config: models/draft/config.json.
        config_points: the points that the engine named in the record makes of config.json's layer ids.
        tensors: tensor, shape (as text), dtype, finite, of model.safetensors.
        d2t: offsets; target id = draft id + offset.
        in_t2d: ids for which t2d is true.
        weights_digest, config_digest: of the two files.
        target: the target on this disk.
        reports: the reports of the two earlier gates.
        prepared_digest: of the prepared rows that the draft's merged set names.
        release: the last release, or None before the first.
    """

    record: DraftRecord
    config: dict[str, Any]
    config_points: tuple[int, ...]
    tensors: DataFrame
    d2t: tuple[int, ...]
    in_t2d: frozenset[int]
    weights_digest: str
    config_digest: str
    target: TargetIdentity
    train: TrainMetrics
    serve: ServeEvidence
    benchmark: BenchmarkEvidence
    policy: ServingPolicy
    reports: tuple[GateReport, GateReport]
    prepared_digest: str
    release: ReleaseRecord | None
