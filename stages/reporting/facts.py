"""Whatever the line has written so far, read for people: missing facts are None, unreadable ones are named.

Only JSON and CSV, through the contracts: no torch, no pandas, so that a glance takes no time.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    TRAIN_CURVES,
    TRAIN_METRICS,
    BenchmarkEvidence,
    ServeEvidence,
    ServingPolicy,
    TrainMetrics,
)
from stages.contracts.files import Fact
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    MERGED_MANIFEST,
    PREPARED_MANIFEST,
    CaptureManifest,
    MergedManifest,
    PreparedManifest,
)
from stages.contracts.report import GateName, GateReport, report_path

FactT = TypeVar("FactT", bound=Fact)
GATES: tuple[GateName, ...] = ("extraction", "training", "deployment")
Curves = dict[str, list[tuple[float, float]]]


@dataclass
class Line:
    """The state of the line: its facts, and what could not be read."""

    root: Path
    prepared: PreparedManifest | None = None
    capture: CaptureManifest | None = None
    merged: MergedManifest | None = None
    draft: DraftRecord | None = None
    train: TrainMetrics | None = None
    serve: ServeEvidence | None = None
    benchmark: BenchmarkEvidence | None = None
    policy: ServingPolicy | None = None
    reports: dict[GateName, GateReport] = field(default_factory=dict)
    training_curves: Curves = field(default_factory=dict)
    held_out_curves: Curves = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)

    def subject_digest(self, gate: GateName) -> str | None:
        """Digest of what stands on disk for `gate` to judge now."""
        subject = {"extraction": self.prepared, "training": self.merged, "deployment": self.draft}[gate]
        return subject.digest() if subject else None

    def verdict(self, gate: GateName) -> str:
        """passed | refused | stale (it judged other bytes than those that stand there) | missing."""
        report = self.reports.get(gate)
        if report is None:
            return "missing"
        if report.subject_digest != self.subject_digest(gate):
            return "stale"
        return "passed" if report.success else "refused"

    def of_this_draft(self, digest: str | None) -> bool:
        """Whether evidence with `digest` speaks of the draft that stands on disk."""
        return self.draft is not None and digest == self.draft.digest()

    def of_these_rows(self) -> bool:
        """Whether the draft that stands on disk was trained on the rows that stand there."""
        if self.draft is None or self.merged is None or self.prepared is None:
            return False
        return (self.draft.merged_digest, self.merged.prepared_digest) == (self.merged.digest(), self.prepared.digest())


def read_line(root: Path = Path()) -> Line:
    """Read every fact there is below `root`."""
    line = Line(root)

    def fact(kind: type[FactT], path: Path) -> FactT | None:
        if not (root / path).exists():
            return None
        try:
            return kind.read(root / path)
        except DataError as error:
            line.unreadable.append(f"{path}: {error.what}. {error.got}"[:300])
            return None

    def curves(name: str) -> Curves:
        path = TRAIN_CURVES / f"{name}.csv"
        try:
            return read_curves(root / path)
        except DataError as error:
            line.unreadable.append(f"{path}: {error.what}. {error.got}"[:300])
            return {}

    line.prepared = fact(PreparedManifest, PREPARED_MANIFEST)
    line.capture = fact(CaptureManifest, CAPTURE_MANIFEST)
    line.merged = fact(MergedManifest, MERGED_MANIFEST)
    line.draft = fact(DraftRecord, DRAFT / DRAFT_RECORD)
    line.train = fact(TrainMetrics, TRAIN_METRICS)
    line.serve = fact(ServeEvidence, SERVE_EVIDENCE)
    line.benchmark = fact(BenchmarkEvidence, BENCHMARK_EVIDENCE)
    line.policy = fact(ServingPolicy, POLICY)
    for gate in GATES:
        report = fact(GateReport, report_path(gate))
        if report is not None:
            line.reports[gate] = report
    line.training_curves = curves("training")
    line.held_out_curves = curves("held_out")
    return line


def read_curves(path: Path) -> Curves:
    """Columns of a CSV against its `step` column; cells that are no number are left out, no file is no curves.

    Raises:
        DataError: a folder, unreadable, or no UTF-8 text in columns.
    """
    if not path.exists():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            "These curves cannot be read",
            where=str(path),
            expected="a CSV file in UTF-8 with a `step` column",
            got=str(error),
            do="remove it and run `dvc repro train`",
        ) from error
    curves: Curves = {}
    for row in rows:
        step = _number(row.get("step"))
        for name, cell in row.items():
            value = _number(cell)
            if step is not None and value is not None and name != "step":
                curves.setdefault(str(name), []).append((step, value))
    return curves


def _number(cell: object) -> float | None:
    try:
        value = float(str(cell))
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None
