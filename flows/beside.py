"""The new draft measured beside production's before it is promoted: when that is due, and the command that does it.

A step of the flow and not a stage of DVC's graph: who is production is no dependency of the line (each promotion would make the
draft that was promoted stale), and the comparison has to be of the pointer as it stands now.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from flows import line
from flows.child import run_child
from stages.contracts.beside import BESIDE, BesideProduction
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError
from stages.contracts.evidence import SERVE_EVIDENCE, ServeEvidence
from stages.contracts.params import load_promotion
from stages.contracts.release import current_record

TASK = "beside production"
_ENGINE = "in_process"  # the one that stages/beside.py measures in


def is_due(root: Path) -> bool:
    """Whether there is a production draft, it is another than this one, and the two were not yet measured together.

    Raises:
        LineError: params, pointer or the draft's record cannot be read.
    """
    production = current_record(root)
    if production is None or load_promotion(root / "params.yaml").production_beside == "ignore":
        return False
    draft, served = DraftRecord.read(root / DRAFT / DRAFT_RECORD).digest(), ServeEvidence.read(root / SERVE_EVIDENCE)
    if served.engine != _ENGINE or production.draft_digest == draft:
        return False
    wanted = (draft, production.draft_digest, served.engine, served.engine_version)
    return _measured(root) != wanted


def _measured(root: Path) -> tuple[str, str, str, str] | None:
    """What the file is of; none where there is no file, or one that cannot be read: it is written anew."""
    try:
        told = BesideProduction.read(root / BESIDE)
    except DataError:
        return None
    return told.draft_digest, told.production_draft_digest, told.engine, told.engine_version


def measure(root: Path, time_limit_s: float, say: Callable[[str], None]) -> None:
    """Run stages/beside.py as a child.

    Raises:
        Refusal, StageError, StageCrash, TimeLimit: as of a stage; see flows/line.py.
    """
    command = [sys.executable, "-m", "stages.beside"]
    ended = run_child(command, cwd=root, env=line.environment(), time_limit_s=time_limit_s, on_line=say)
    if ended.code:
        raise line.told_failure(TASK, " ".join(command[1:]), ended)
