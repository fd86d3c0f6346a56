"""extract and merge killed at any moment: what a later run finishes has the bytes of a run that nothing stopped."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stages import extract, merge
from stages.capture.store import verify_store
from stages.contracts.manifest import HIDDEN_STATES, MERGED
from tests import line, tiny
from tests.capture.conftest import bytes_of

SOURCES = (line.TinySource("code", "coding", 13), line.TinySource("talk", "general", 7))
OUTPUTS = (Path(".cache"), HIDDEN_STATES, MERGED)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    target = tiny.make_target(tmp_path / "target")
    manifest = line.write_prepared(tmp_path, target, SOURCES)
    line.write_gate_report(tmp_path, "extraction", manifest.digest())
    line.write_params(tmp_path, target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def work() -> None:
    extract.main()
    merge.main()


def made() -> tuple[dict[str, bytes], dict[str, bytes]]:
    return bytes_of(HIDDEN_STATES), bytes_of(MERGED)


def killed(do: Callable[[], None], after_s: float) -> bool:
    """Run `do` in a process of its own and kill it after so many seconds; False when it was done before."""
    child = os.fork()
    if not child:
        code = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2)
            do()
            code = 0
        finally:
            os._exit(code)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed by itself"
    return os.WIFSIGNALED(status)


def from_nothing() -> float:
    """The whole work with nothing there before; the seconds it takes."""
    for output in OUTPUTS:
        shutil.rmtree(output, ignore_errors=True)
    started = time.monotonic()
    work()
    return time.monotonic() - started


def kill_and_finish(times: int, seed: int) -> None:
    """From nothing, killed at a random moment before it is done, then finished, `times` over."""
    from_nothing()  # warms what a process does once
    took, whole = from_nothing(), made()
    moments, hit = random.Random(seed), 0
    while hit < times:
        for output in OUTPUTS:
            shutil.rmtree(output)
        if killed(work, moments.uniform(0, took)):
            hit += 1
        else:
            took = from_nothing()  # the machine is faster now than when it was timed
        work()
        assert made() == whole and not verify_store(HIDDEN_STATES)
        assert not [p for p in Path().rglob("*") if p.suffix in (".part", ".old")]
        assert not Path(".cache/quarantine").exists(), "a kill leaves nothing damaged"


def test_a_handful_of_kills_leave_no_trace(here: Path) -> None:
    kill_and_finish(4, seed=1)


@pytest.mark.slow
def test_fifty_kills_leave_no_trace(here: Path) -> None:
    kill_and_finish(50, seed=2)


def test_a_repair_that_is_killed_is_finished_by_the_next_run(here: Path) -> None:
    work()
    whole = made()
    file = sorted(Path(".cache/states").glob("*/*/rows.safetensors"))[0]
    with file.open("r+b") as handle:
        handle.seek(3000)
        handle.write(b"damaged")
    bad = file.read_bytes()
    killed(work, 0.05)
    work()
    assert made() == whole and not verify_store(HIDDEN_STATES)
    assert bad in [kept.read_bytes() for kept in Path(".cache/quarantine").glob("*/rows.safetensors")]
