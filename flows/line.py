"""The line as a flow sees it: through DVC's command line, one stage at a time. DVC keeps the only graph."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from flows.child import Ended, run_child
from stages.contracts.errors import LineError, Refusal
from stages.contracts.report import GateName, GateReport, report_path


class StageError(LineError):
    """A stage said what is wrong and what to do; running it again would say the same."""


class StageCrash(LineError):
    """A stage ended without a word of its own (killed, out of memory, a full disk): worth another try."""


class Busy(LineError):
    """Another run of DVC holds files of this line."""


def gate_of(stage: str) -> GateName | None:
    """The gate a stage is, by its name in dvc.yaml: `gate-training` is gate `training`."""
    return next((name for name in get_args(GateName) if stage == f"gate-{name}"), None)


def dvc(*words: str) -> list[str]:
    return [sys.executable, "-m", "dvc", *words]


def environment() -> dict[str, str]:
    """This process's environment, with its own Python first: dvc.yaml says `python`."""
    here = str(Path(sys.executable).parent)
    return os.environ | {"PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}", "DVC_NO_ANALYTICS": "1"}


def stage_names(root: Path) -> list[str]:
    """The stages of dvc.yaml, in its order.

    Raises:
        StageError: DVC cannot read the graph.
    """
    told = subprocess.run(
        dvc("stage", "list", "--name-only"), cwd=root, env=environment(), capture_output=True, text=True
    )
    names = told.stdout.split()
    if told.returncode or not names:
        raise StageError(
            "DVC lists no stages",
            where=str(root / "dvc.yaml"),
            got=told.stderr.strip() or "nothing",
            do="run the flow from the repository root; `dvc stage list` tells what is wrong",
        )
    return names


def unchanged(names: Sequence[str], root: Path) -> frozenset[str]:
    """Those of `names`, in the graph's order, that stand before the first stage that DVC would run: one question for all, where
    each `dvc repro` takes two seconds to find nothing to do. None when DVC does not answer; then each stage is asked."""
    told = subprocess.run(dvc("status", "--json"), cwd=root, env=environment(), capture_output=True, text=True)
    try:
        changed = json.loads(told.stdout) if told.returncode == 0 else dict.fromkeys(names)
    except json.JSONDecodeError:
        return frozenset()
    return frozenset(itertools.takewhile(lambda name: name not in changed, names))


def holders(root: Path) -> list[str]:
    """Living processes that hold files of this line, as DVC's own lock file tells; dead ones DVC forgets by itself."""
    try:
        locks = json.loads((root / ".dvc/tmp/rwlock").read_text() or "{}")
    except (FileNotFoundError, json.JSONDecodeError):  # none, or being rewritten this moment
        return []
    infos = [*locks.get("write", {}).values(), *(i for readers in locks.get("read", {}).values() for i in readers)]
    return sorted({f"PID {i['pid']}: {i['cmd']}" for i in infos if i and _alive(int(i["pid"]))})


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def wait_until_free(root: Path, limit_s: float, say: Callable[[str], None]) -> None:
    """Wait while another run holds files of this line, and say so.

    Raises:
        Busy: still held after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    told: list[str] = []
    while found := holders(root):
        if time.monotonic() >= deadline:
            raise Busy(
                "Another run of DVC holds this line",
                where=str(root / ".dvc/tmp/rwlock"),
                expected=f"free within {limit_s:g} s",
                got="; ".join(found),
                do="let it end or end it, then start the flow again; if the process is not DVC's, remove that file",
            )
        if found != told:
            say(f"waiting for {'; '.join(found)}, at most {limit_s:g} s")
            told = found
        time.sleep(1)


def run_stage(stage: str, root: Path, time_limit_s: float, say: Callable[[str], None]) -> None:
    """Bring one stage up to date (`dvc repro --single-item`); an unchanged stage takes two seconds.

    Raises:
        Refusal: a gate, or a stage's own check, said no.
        StageError: the stage told what is wrong.
        StageCrash: it ended without a word.
        TimeLimit: it took too long.
    """
    began = time.time()
    command = dvc("--wait-for-lock", "repro", "--single-item", stage)
    ended = run_child(command, cwd=root, env=environment(), time_limit_s=time_limit_s, on_line=say)
    if ended.code:
        raise _failure(stage, ended, root, began)


def _failure(stage: str, ended: Ended, root: Path, began: float) -> LineError:
    """What a failed stage means; `dvc repro` exits 255 for any failure, so its words are read, not its code."""
    report = gate_report(stage, root, began - 1)
    if report is not None and not report.success:
        return Refusal(f"{stage} refused {report.subject}", where=str(report_path(report.gate)), got=words_of(report))
    return told_failure(stage, f"dvc repro --single-item {stage}", ended)


def told_failure(name: str, command: str, ended: Ended) -> LineError:
    """What a failed command of ours said of itself: a refusal, an error that can be mended, or nothing."""
    for head, kind in (("refused: ", Refusal), ("error: ", StageError)):
        told = _block(ended.lines, head)
        if told:
            return kind(f"{name}: {told}")
    return StageCrash(
        f"{name} ended without a word of its own",
        where=command,
        expected="exit code 0",
        got=f"exit code {ended.code}; last lines: " + " | ".join(ended.lines[-5:]),
        do="look at the log above; finished work is kept, `dvc repro` goes on from it",
    )


def _block(lines: tuple[str, ...], head: str) -> str:
    """The line that begins with `head` and the indented lines after it."""
    for i, line in enumerate(lines):
        if line.startswith(head):
            more = [later for later in lines[i + 1 : i + 40]]
            end = next((k for k, later in enumerate(more) if not later.startswith(" ")), len(more))
            return "\n".join([line.removeprefix(head), *more[:end]])
    return ""


def gate_report(stage: str, root: Path, since: float = 0.0) -> GateReport | None:
    """The stage's report, when it is a gate and the report was written after `since` (seconds since the epoch)."""
    gate = gate_of(stage)
    path = root / report_path(gate) if gate else None
    if path is None or not path.exists() or path.stat().st_mtime < since:
        return None
    return GateReport.read(path)


def words_of(report: GateReport) -> str:
    """The failed checks of a report in a line each: what, expected, found, what to do."""
    failed = [c for c in report.checks if not c.success]
    return "\n".join(
        f"{c.table}{'.' + c.column if c.column else ''}: {c.assertion}: expected {c.expected}, got {c.actual}"
        + (f" ({', '.join(c.failing[:5])})" if c.failing else "")
        + (f"; {c.do}" if c.do else "")
        for c in failed
    )
