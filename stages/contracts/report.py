"""What a gate says. One report a gate, canonical bytes, bound to the digest of what it judged."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from stages.contracts.errors import Refusal
from stages.contracts.files import Fact

GateName = Literal["extraction", "training", "deployment"]
GATE_REPORTS = Path("reports/gates")


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
    version: Literal[1] = 1
    gate: GateName
    subject: str
    subject_digest: str
    success: bool
    checks: tuple[Check, ...]


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
