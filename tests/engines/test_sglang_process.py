"""A server's process group: ready in time or refused with its log, ended for sure, gone when its owner is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.contracts.errors import EngineError
from stages.engines._sglang_process import ServerProcess, members

ROOT = Path(__file__).resolve().parents[2]
# A server with two helpers; `stubborn` ones do not end when asked.
SERVER = """
import signal, subprocess, sys, time
stubborn = "stubborn" in sys.argv
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
helpers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
print("serving", flush=True)
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
from stages.engines._sglang_process import ServerProcess
process = ServerProcess([sys.executable, "-c", sys.argv[1], *sys.argv[3:]], env={}, log=Path(sys.argv[2]))
print(process.group, flush=True)
time.sleep(600)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "server.log"


@pytest.fixture
def started(log: Path) -> Iterator[ServerProcess]:
    process = ServerProcess([sys.executable, "-c", SERVER], env={}, log=log)
    yield process
    process.end()


def gone(group: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not members(group):
            return True
        time.sleep(0.05)
    return not members(group)


def test_a_server_is_waited_for_and_ended_with_its_helpers(started: ServerProcess, log: Path) -> None:
    started.wait_until(lambda: "serving" in log.read_text(), 20, "starts")
    assert started.running and len(members(started.group)) >= 4
    started.end()
    assert members(started.group) == [] and not started.running
    started.end()  # once more does no harm


def test_a_server_that_dies_is_told_with_its_last_words(log: Path) -> None:
    program = "print('no such backend'); raise SystemExit(3)"
    process = ServerProcess([sys.executable, "-c", program], env={}, log=log)
    with pytest.raises(EngineError, match=r"ended before it was ready(.|\n)*no such backend"):
        process.wait_until(lambda: False, 20, "starts")
    process.end()
    assert members(process.group) == []


def test_a_server_that_takes_too_long_is_refused(started: ServerProcess) -> None:
    with pytest.raises(EngineError, match=r"did not start in time(.|\n)*within 0.5 s"):
        started.wait_until(lambda: False, 0.5, "starts")


def test_a_server_that_will_not_end_is_killed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.engines._sglang_process._GRACE_S", 0.5)
    process = ServerProcess([sys.executable, "-c", SERVER, "stubborn"], env={}, log=log)
    process.wait_until(lambda: "serving" in log.read_text(), 20, "starts")
    process.end()
    assert members(process.group) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.4])
def test_kill_9_of_the_owner_leaves_no_server(log: Path, delay_s: float) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), SERVER, str(log)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    time.sleep(delay_s)
    assert members(group)
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    assert gone(group, 5.0), members(group)
