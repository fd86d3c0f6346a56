"""gate: judge what stands before a spend. `python -m stages.gate extraction | training | deployment`

Gathers plain tables (stages/_gate_*.py alone know where they come from), lets stages/gates judge them, writes the report,
and exits 1 on a refusal; whatever was made before stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import get_args

from stages._gate_deployment import gather_deployment
from stages._gate_extraction import accepted_dataset, gather_extraction
from stages._gate_files import Gathered
from stages._gate_training import gather_training
from stages.contracts.errors import LineError, Refusal, run
from stages.contracts.params import Params, load_params
from stages.contracts.quality import ACCEPTED_DATASET, PREPARED_QUALITY, PreparedQuality, accept
from stages.contracts.report import GateName, evidence_digests, report_path
from stages.gates._judge import judge, summary
from stages.reporting.page import write_page

GATHER: dict[str, Callable[[Params], Gathered]] = {
    "extraction": gather_extraction,
    "training": gather_training,
    "deployment": gather_deployment,
}


def choose(arguments: Sequence[str]) -> GateName:
    """The one selector on the command line.

    Raises:
        LineError: none, or not a gate.
    """
    names = get_args(GateName)
    if len(arguments) != 1 or arguments[0] not in names:
        raise LineError(
            "Which gate?",
            where="command line",
            expected=f"one of {', '.join(names)}",
            got=" ".join(arguments) or "nothing",
        )
    return next(n for n in names if n == arguments[0])


def main() -> None:
    gate = choose(sys.argv[1:])
    report_path(gate).unlink(missing_ok=True)  # what cannot be judged must not stand as passed
    params = load_params()
    subject, digest, tables = GATHER[gate](params)
    report = judge(gate, subject, digest, tables)
    if gate == "deployment":
        report = report.model_copy(update={"evidence": evidence_digests()})
    report.write(report_path(gate))
    if gate == "extraction" and report.success:
        accept(PreparedQuality.read(PREPARED_QUALITY), accepted_dataset()).write(ACCEPTED_DATASET)
    if gate == "deployment" or not report.success:
        write_page()
    print(summary(report))
    failed = [c.assertion for c in report.checks if not c.success]
    if failed:
        raise Refusal(
            f"gate-{gate}: {len(failed)} of {len(report.checks)} checks failed",
            where=str(report_path(gate)),
            expected="every check passes before more is spent",
            got="; ".join(failed),
            do="do what each failed check says, then `dvc repro`; reports/index.html shows them all",
        )


if __name__ == "__main__":
    run(main)
