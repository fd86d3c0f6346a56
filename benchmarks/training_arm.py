"""One trainer of the comparison in a process of its own; what it measured, as a line of JSON.

    python -m benchmarks.training_arm INPUTS ARM STEPS ROW_TOKENS SECONDS

ARM: specforge, speculators, or ours with options: -trained (head), -bfloat16 (products), -ce, -lk (loss). ROW_TOKENS 0 takes rows as they are; otherwise rows are joined
to rows of that length. Trains on batches of `batch_tokens` row tokens until SECONDS of CPU have been spent after a warm-up.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.training_peers import SpecForge, Speculators
from benchmarks.training_rows import Inputs, as_one_row
from stages.drafts.eagle3 import BatchOrder, Eagle3, PackedBatch, Schedule, Teacher, Trainer

BATCH_TOKENS, WARM, THREADS = 1024, 3, 2
RATE = 0.0015


class Arm(Protocol):
    """A trainer: one optimizer step on a batch at a learning rate; its weights under our names."""

    def step(self, batch: PackedBatch, rate: float) -> None: ...

    def weights(self) -> dict[str, Tensor]: ...


class Ours:
    """The line's own trainer, from the start that the line gives it."""

    def __init__(self, inputs: Inputs, steps: int, seed: int, options: Sequence[str]) -> None:
        c = inputs.config
        ids = inputs.tensor("d2t") + torch.arange(c.draft_vocab_size)
        products = torch.bfloat16 if "bfloat16" in options else None
        loss = next((name for name in ("ce", "lk") if name in options), "kl")
        head = inputs.tensor("head")[ids].clone()
        teacher = Teacher(inputs.tensor("norm"), head, c.eps, ids, c.vocab_size, loss=loss, products=products)
        torch.manual_seed(seed)
        draft = Eagle3(c, inputs.tensor("embedding"))
        draft.load_state_dict(inputs.start())
        draft.lm_head.requires_grad_("trained" in options)
        schedule = Schedule(1, RATE, 0.0, 0.01, 1.0, steps, 0.8)
        self.trainer = Trainer(draft, teacher, schedule)

    def step(self, batch: PackedBatch, rate: float) -> None:
        # The rate of step 0 of one step is its peak.
        self.trainer.schedule = _at(self.trainer.schedule, rate)
        self.trainer.train(batch)

    def weights(self) -> dict[str, Tensor]:
        return self.trainer.averaged().state_dict()


def _at(schedule: Schedule, rate: float) -> Schedule:
    class Fixed(Schedule):
        def rate(self, step: int) -> float:
            return rate

    return Fixed(**vars(schedule))


def make_arm(name: str, inputs: Inputs, steps: int, seed: int) -> Arm:
    """The trainer of this name."""
    if name == "specforge":
        return SpecForge(inputs, steps, seed)
    if name == "speculators":
        return Speculators(inputs, steps, seed)
    return Ours(inputs, steps, seed, name.split("-")[1:])


def peak_mb() -> float:
    """Highest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    folder, name, steps, row_tokens, seconds = sys.argv[1:]
    torch.set_num_threads(THREADS)
    inputs, length = Inputs(Path(folder)), int(row_tokens)
    arm = make_arm(name, inputs, int(steps), 1)
    order = BatchOrder(inputs.lengths, max(BATCH_TOKENS, length + max(inputs.lengths) if length else 0), 1)
    tokens, number, cpu, wall = 0, 0, 0.0, 0.0
    while cpu < float(seconds):
        batch = inputs.pack(order(number))
        number += 1
        if length:
            if len(batch.input_ids) < length:
                continue
            batch = as_one_row(batch, length)
        started, clock = time.process_time(), time.perf_counter()
        arm.step(batch, RATE)
        if number > WARM:
            cpu += time.process_time() - started
            wall += time.perf_counter() - clock
            tokens += len(batch.input_ids)
    found = {"tokens": tokens, "cpu_s": cpu, "wall_s": wall, "peak_mb": peak_mb()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
