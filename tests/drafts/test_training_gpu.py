"""The GPU benchmark's code, small, on a CPU; and the same step on a GPU where there is one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.training_gpu import Measured, measure
from tests.drafts.reference import CONFIG

SMALL = dataclasses.replace(CONFIG, hidden_size=32, draft_vocab_size=24)


def sensible(found: Measured) -> bool:
    return found.tokens_per_s > 0 and found.flop_per_s > found.tokens_per_s and 0 < found.loss < 20


@pytest.mark.parametrize("steps", [3, 7])
def test_the_benchmark_runs_small_on_a_cpu(steps: int) -> None:
    assert sensible(measure(SMALL, torch.device("cpu"), steps, rows=2, row_tokens=32, seconds=0.05))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_benchmark_runs_small_on_a_gpu() -> None:
    assert sensible(measure(SMALL, torch.device("cuda"), 3, rows=2, row_tokens=32, seconds=0.05))
