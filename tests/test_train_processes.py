"""stages/train.py in several processes: the run is the same, whoever started them and however often it was stopped."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages import train
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import TRAIN_CURVES, TRAIN_METRICS, TrainMetrics
from tests import line
from tests.test_train import merged_line  # noqa: F401

pytestmark = pytest.mark.slow
TRAIN = (sys.executable, "-m", "stages.train")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")


@pytest.fixture
def here(merged_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # noqa: F811
    shutil.copytree(merged_line, tmp_path / "line")
    monkeypatch.chdir(tmp_path / "line")
    set_params()
    yield Path()


def set_params(**values: object) -> None:
    told = {"optimizer_steps": 14, "checkpoint_every": 2, "evaluate_every": 7, "batch_tokens": 384, **values}
    line.write_params(Path(), Path("target").absolute(), {"train": told})


def start(command: tuple[str, ...]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(line.ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(command: tuple[str, ...]) -> str:
    """What the run said, when it was good."""
    child = start(command)
    _, said = child.communicate(timeout=300)
    assert child.returncode == 0, said
    return said


def figures() -> tuple[list[list[float]], TrainMetrics]:
    """Loss by step and accept length by evaluation, from files that only the first process writes."""
    curves = [
        [float(value) for row in csv.DictReader((TRAIN_CURVES / f"{name}.csv").open()) for value in row.values()]
        for name in ("training", "held_out")
    ]
    return curves, TrainMetrics.read(TRAIN_METRICS)


def same(one: tuple[list[list[float]], TrainMetrics], two: tuple[list[list[float]], TrainMetrics]) -> None:
    for a, b in zip(one[0], two[0], strict=True):
        assert a == pytest.approx(b, abs=2e-6)
    assert one[1].train_loss == pytest.approx(two[1].train_loss, abs=1e-6)
    assert one[1].held_out_loss == pytest.approx(two[1].held_out_loss, abs=1e-6)
    assert one[1].overall == two[1].overall and one[1].by_domain == two[1].by_domain


def test_torchrun_and_the_stages_own_processes_and_pieces_train_the_draft_of_one_process(here: Path) -> None:
    finish(TRAIN)
    alone = figures()
    finish((*TORCHRUN, "-m", "stages.train"))
    same(figures(), alone)
    set_params(processes=2, accumulate=2, shard_weights=True, recompute_steps=True)
    said = finish(TRAIN)
    same(figures(), alone)
    assert said.count("train:") <= 1, "only the first process says how far it is"
    assert DraftRecord.read(DRAFT / DRAFT_RECORD).supervised_tokens_seen > 0


def below(pid: int) -> list[int]:
    """Children of `pid`, and theirs."""
    told = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [p for child in map(int, told) for p in (child, *below(child))]


def killed_at_a_point(command: tuple[str, ...], step: int) -> None:
    """Start a run and kill all its processes once the point of `step` or a later one is there."""
    child = start(command)
    deadline = time.monotonic() + 120
    while not [p for p in train.WORK.glob("*/step_*") if p.name >= f"step_{step:06d}" and p.name[-1].isdigit()]:
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    for pid in [child.pid, *below(child.pid)]:  # torchrun's children have sessions of their own
        os.kill(pid, signal.SIGKILL)
    child.communicate()


def test_a_run_may_go_on_in_another_number_of_processes(here: Path) -> None:
    set_params(optimizer_steps=40, evaluate_every=40)
    finish(TRAIN)
    alone = figures()
    killed_at_a_point((*TORCHRUN, "-m", "stages.train"), 4)
    said = finish(TRAIN)
    assert "resumed after step" in said
    same(figures(), alone)


def test_two_processes_that_are_refused_end_and_say_why(here: Path) -> None:
    set_params(processes=2)
    shutil.rmtree("reports/gates")
    child = start(TRAIN)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 1 and "refused: gate-training has not judged this" in said


def test_a_process_that_is_killed_ends_the_run_in_words_and_the_last_point_is_gone_on_from(here: Path) -> None:
    set_params(optimizer_steps=60, evaluate_every=60, processes=2)
    child = start(TRAIN)
    deadline = time.monotonic() + 120
    while not list(train.WORK.glob("*/step_00000[2-9]")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    (other,) = below(child.pid)
    os.kill(other, signal.SIGKILL)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 2 and "nother process of this training run" in said
    assert "resumed after step" in finish(TRAIN)
