"""One trainer of the comparison in a process of its own; what it measured, as a line of JSON.

    python -m benchmarks.training_arm INPUTS ARM STEPS ROW_TOKENS SECONDS

ARM: specforge or speculators, either with -bfloat16, or ours with options: -trained (head), -bfloat16 (products), -ce, -lk
(loss), -accepted (chains), -steps7 (draft steps, whatever STEPS says). ROW_TOKENS 0 takes rows as they are; otherwise rows are joined
to rows of that length. Trains on batches of `batch_tokens` row tokens until SECONDS of CPU have been spent after a warm-up.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.training_floor import product_rate, products_flop, where_time_goes
from benchmarks.training_peers import SpecForge, Speculators
from benchmarks.training_rows import Inputs, as_one_row
from stages.drafts._loss import Chains, Loss
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
        loss: Loss = "ce" if "ce" in options else "lk" if "lk" in options else "kl"
        head = inputs.tensor("head")[ids].clone()
        chains: Chains = "accepted" if "accepted" in options else "all"
        norm = inputs.tensor("norm")
        teacher = Teacher(norm, head, c.eps, ids, c.vocab_size, loss=loss, products=products, chains=chains)
        torch.manual_seed(seed)
        draft = Eagle3(c, inputs.tensor("embedding"))
        draft.load_state_dict(inputs.start())
        draft.lm_head.requires_grad_("trained" in options)
        steps = next((int(o.removeprefix("steps")) for o in options if o.startswith("steps")), steps)
        schedule = Schedule(1, RATE, 0.0, 0.01, 1.0, steps, 0.8)
        self.trainer = Trainer(draft, teacher, schedule)

    def step(self, batch: PackedBatch, rate: float) -> None:
        # The rate of step 0 of one step is its peak.
        self.trainer.schedule = _at(self.trainer.schedule, rate)
        self.trainer.train(batch)

    def weights(self) -> dict[str, Tensor]:
        return self.trainer.averaged().state_dict()

    def explained(self, batches: Sequence[PackedBatch]) -> dict[str, Any]:
        """The products of these steps, the rate of such products here, and where a step's time goes."""
        draft, steps = self.trainer.draft, self.trainer.schedule.steps_ahead
        trained = draft.lm_head.weight.requires_grad
        return {
            "products_flop": sum(products_flop(draft.config, b, steps, trained) for b in batches),
            "flop_per_cpu_s": product_rate(draft.config, self.trainer.teacher.products or torch.float32),
            "shares": where_time_goes(lambda: self.step(batches[-1], RATE)),
        }


def _at(schedule: Schedule, rate: float) -> Schedule:
    class Fixed(Schedule):
        def rate(self, step: int) -> float:
            return rate

    return Fixed(**vars(schedule))


def make_arm(name: str, inputs: Inputs, steps: int, seed: int) -> Arm:
    """The trainer of this name."""
    trainer, *options = name.split("-")
    if trainer == "ours":
        return Ours(inputs, steps, seed, options)
    peer = {"specforge": SpecForge, "speculators": Speculators}[trainer]
    return peer(inputs, steps, seed, torch.bfloat16 if "bfloat16" in options else torch.float32)


def peak_mb() -> float:
    """Highest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def measure(arm: Arm, batches: Iterator[PackedBatch], seconds: float) -> dict[str, Any]:
    """Steps until `seconds` of CPU are spent, the first WARM not counted."""
    for _ in range(WARM):
        arm.step(next(batches), RATE)
    tokens, cpu, wall, taken = 0, 0.0, 0.0, []
    while cpu < seconds:
        batch = next(batches)
        started, clock = time.process_time(), time.perf_counter()
        arm.step(batch, RATE)
        cpu, wall = cpu + time.process_time() - started, wall + time.perf_counter() - clock
        tokens += len(batch.input_ids)
        taken.append(batch)
    found: dict[str, Any] = {"tokens": tokens, "cpu_s": cpu, "wall_s": wall, "peak_mb": peak_mb()}
    if isinstance(arm, Ours):
        found |= arm.explained(taken)
    return found


def batches_of(inputs: Inputs, row_tokens: int) -> Iterator[PackedBatch]:
    """Batches without end: rows as they are, or joined to one row of `row_tokens`."""
    order = BatchOrder(inputs.lengths, row_tokens + max(inputs.lengths) if row_tokens else BATCH_TOKENS, 1)
    for number in itertools.count():
        batch = inputs.pack(order(number))
        if not row_tokens:
            yield batch
        elif len(batch.input_ids) >= row_tokens:
            yield as_one_row(batch, row_tokens)


def main() -> None:
    folder, name, steps, row_tokens, seconds = sys.argv[1:]
    torch.set_num_threads(THREADS)
    inputs = Inputs(Path(folder))
    arm = make_arm(name, inputs, int(steps), 1)
    print(json.dumps(measure(arm, batches_of(inputs, int(row_tokens)), float(seconds))))


if __name__ == "__main__":
    main()
