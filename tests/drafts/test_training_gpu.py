"""The GPU benchmark's code, small, on a CPU; and the same step on a GPU where there is one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.training_gpu import Measured, measure
from stages import train
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import TRAIN_METRICS, TrainMetrics
from tests import line
from tests.drafts.reference import CONFIG
from tests.test_train import here, interrupted, merged_line

__all__ = ["here", "merged_line"]

SMALL = dataclasses.replace(CONFIG, hidden_size=32, draft_vocab_size=24)


def sensible(found: Measured) -> bool:
    return found.tokens_per_s > 0 and found.flop_per_s > found.tokens_per_s and 0 < found.loss < 20


@pytest.mark.parametrize("steps", [3, 7])
def test_the_benchmark_runs_small_on_a_cpu(steps: int) -> None:
    assert sensible(measure(SMALL, torch.device("cpu"), steps, rows=2, row_tokens=32, seconds=0.05))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_benchmark_runs_small_on_a_gpu() -> None:
    assert sensible(measure(SMALL, torch.device("cuda"), 3, rows=2, row_tokens=32, seconds=0.05))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_run_on_a_gpu_is_judged_stopped_gone_on_with_and_exported(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"target": {"device": "cuda"}, "train": {"products": "auto"}}
    line.write_params(here, (here / "target").absolute(), changes)
    interrupted(monkeypatch)
    train.main()
    record = DraftRecord.read(DRAFT / DRAFT_RECORD)
    assert TrainMetrics.read(TRAIN_METRICS).draft_digest == record.digest() and record.optimizer_steps in (6, 12)
