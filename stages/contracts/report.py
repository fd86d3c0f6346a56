"""What a gate says. One report a gate, canonical bytes, bound to the digest of what it judged."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from stages.contracts.errors import Refusal
from stages.contracts.evidence import BENCHMARK_EVIDENCE, POLICY, SERVE_EVIDENCE, TRAIN_METRICS
from stages.contracts.files import Fact, file_digest

GateName = Literal["extraction", "training", "deployment"]
GATE_REPORTS = Path("reports/gates")
EVIDENCE = (TRAIN_METRICS, SERVE_EVIDENCE, BENCHMARK_EVIDENCE, POLICY)


class Check(Fact):
    """One expectation's result (field names as OpenLineage's data quality facets use them)."""

    table: str
    assertion: str
    column: str
    success: bool
    expected: str
    actual: str
    severity: Literal["error"] = "error"
    failing: tuple[str, ...] = ()
    why: str = ""
    do: str = ""


class GateReport(Fact):
    """evidence: of gate-deployment, the digest of each measurement that it judged beside the draft, by file."""

    version: Literal[1] = 1
    gate: GateName
    subject: str
    subject_digest: str
    success: bool
    checks: tuple[Check, ...]
    evidence: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _success_is_that_of_the_checks(self) -> Self:
        if self.success != all(c.success for c in self.checks):
            raise ValueError(f"success is {self.success}, its checks say otherwise")
        return self


def evidence_digests(root: Path = Path()) -> dict[str, str]:
    """Digest of each measurement's file.

    Raises:
        DataError: one is not there.
    """
    return {str(path): file_digest(root / path) for path in EVIDENCE}


def report_path(gate: GateName) -> Path:
    return GATE_REPORTS / f"{gate}.json"


def demand(gate: GateName, subject_digest: str, root: Path = Path()) -> GateReport:
    """Return the gate's report when it passed and judged exactly `subject_digest`.

    A stage calls this before it spends: `dvc repro -s STAGE` skips the gate's own stage.

    Raises:
        Refusal: no report, a failed one, or one about other bytes.
    """
    path = root / report_path(gate)
    again = f"run `dvc repro gate-{gate}`"
    if not path.exists():
        raise Refusal(
            f"gate-{gate} has not judged this", where=str(path), expected=f"a report on {subject_digest}", do=again
        )
    report = GateReport.read(path)
    if report.subject_digest != subject_digest:
        raise Refusal(
            f"gate-{gate} judged something else",
            where=str(path),
            expected=subject_digest,
            got=report.subject_digest,
            do=again,
        )
    if not report.success:
        failed = [c.assertion for c in report.checks if not c.success]
        raise Refusal(
            f"gate-{gate} refused this",
            where=str(path),
            expected="a passing report",
            got="; ".join(failed),
            do="do what the report says for each check, then `dvc repro`",
        )
    return report
