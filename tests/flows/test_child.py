"""A child cannot outlive its run: not its time limit, not a signal, not the parent's own death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.child import Ended, TimeLimit, run_child


def _run(script: str, cwd: Path, limit_s: float = 20.0) -> tuple[Ended, list[str]]:
    seen: list[str] = []
    ended = run_child(["sh", "-c", script], cwd=cwd, env=os.environ, time_limit_s=limit_s, on_line=seen.append)
    return ended, seen


def _gone(pid: int, within_s: float = 8.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_lines_of_both_streams_arrive_in_order_and_the_code_is_kept(tmp_path: Path) -> None:
    ended, seen = _run("echo one; echo two >&2; printf 'a\\rb\\nlast'; exit 7", tmp_path)
    assert ended.code == 7
    assert seen == ["one", "two", "a", "b", "last"] == list(ended.lines)


def test_a_child_over_its_time_limit_is_gone_with_its_grandchild(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TimeLimit, match=r"longer than it may.*\n.*where: sh -c(.|\n)*within 1 s"):
        _run("sleep 60 & echo $! > pid; wait", tmp_path, limit_s=1)
    assert time.monotonic() - began < 5
    assert _gone(int((tmp_path / "pid").read_text()))


def test_a_child_that_ignores_the_polite_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.child._GRACE_S", 0.5)
    with pytest.raises(TimeLimit):
        _run(
            "trap '' TERM; sh -c \"trap '' TERM; echo \\$\\$ > pid; while :; do sleep 0.1; done\" & while :; do sleep 0.1; done",
            tmp_path,
            1,
        )
    assert _gone(int((tmp_path / "pid").read_text()))


def test_a_grandchild_left_behind_by_a_finished_child_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    ended, _ = _run("sleep 60 & echo $! > pid", tmp_path)
    assert ended.code == 0
    assert time.monotonic() - began < 5
    assert _gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_parent_dies(tmp_path: Path, repo_root: Path, sign: signal.Signals) -> None:
    parent = (
        "import os, signal, sys; from pathlib import Path; from flows.child import run_child\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs start with it ignored
        "run_child(['sh', '-c', 'sleep 60 & echo $! > pid; echo up; wait'], cwd=Path(sys.argv[1]), env=os.environ,"
        " time_limit_s=60, on_line=lambda line: print(line, flush=True))"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", parent, str(tmp_path)], cwd=repo_root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert running.stdout is not None
    assert running.stdout.readline().strip() == b"up"
    running.send_signal(sign)
    assert running.wait(20) != 0
    running.stdout.close()
    assert _gone(int((tmp_path / "pid").read_text()))
