"""The optimizer's side of training: order of rows, schedule, one step, and everything a resumed run needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.contracts.errors import DataError
from stages.drafts._gradients import add_gradients
from stages.drafts._group import ALONE, Group
from stages.drafts._loss import Teacher
from stages.drafts._module import Eagle3
from stages.drafts._shards import part_like, whole, wholes
from stages.drafts._training import Ahead, PackedBatch

_AVERAGE_OVER = 40  # steps that the averaged weights look back on, about


class BatchOrder:
    """Which rows step n takes: a new shuffle every epoch, rows packed into batches of at most `batch_tokens`.

    A pure function of its arguments, so that a resumed run needs no more than the step. A row longer than
    `batch_tokens` is a batch of its own.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int) -> None:
        assert lengths
        self.lengths, self.batch_tokens, self.seed = lengths, batch_tokens, seed
        self._batches: list[list[int]] = []
        self._epochs = 0

    def __call__(self, step: int) -> list[int]:
        """Row numbers of step `step`, 0-based."""
        while step >= len(self._batches):
            self._shuffle()
        return self._batches[step]

    def _shuffle(self) -> None:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self._epochs)
        self._epochs += 1
        batch: list[int] = []
        for row in torch.randperm(len(self.lengths), generator=generator).tolist():
            if batch and sum(self.lengths[r] for r in batch) + self.lengths[row] > self.batch_tokens:
                self._batches.append(batch)
                batch = []
            batch.append(row)
        self._batches.append(batch)


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine to zero; what AdamW is told."""

    optimizer_steps: int
    learning_rate: float
    warmup_share: float
    weight_decay: float
    gradient_clip: float
    steps_ahead: int
    step_decay: float

    def rate(self, step: int) -> float:
        """Learning rate of step `step`, 0-based."""
        warmup = math.ceil(self.warmup_share * self.optimizer_steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / (warmup + 1)
        share = (step - warmup) / max(1, self.optimizer_steps - warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


class Trainer:
    """A draft, its averaged weights and its optimizer.

    `tensors()` and `load()` carry everything that a step changes, so that 10 steps, a stop and 10 more are the same
    bits as 20.
    """

    def __init__(self, draft: Eagle3, teacher: Teacher, schedule: Schedule, group: Group = ALONE) -> None:
        self.draft, self.teacher, self.schedule, self.group = draft, teacher, schedule, group
        self.step = 0
        self._named = {n: p for n, p in draft.named_parameters() if p.requires_grad}
        matrices = [p for p in self._named.values() if p.dim() > 1]
        norms = [p for p in self._named.values() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": norms, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=True)
        self.average = {n: p.detach().clone() for n, p in self._named.items()}

    def train(self, *batches: PackedBatch) -> Ahead:
        """One optimizer step on all batches together, and on those of the group's other processes.

        Raises:
            DataError: the loss or a gradient is not finite; the batch's rows are named and nothing is stepped.
        """
        self._optimizer.zero_grad(set_to_none=True)
        steps, decay = self.schedule.steps_ahead, self.schedule.step_decay
        ahead = add_gradients(self.draft, self.teacher, batches, steps, decay, self.group)
        for parameter in self._named.values():  # of rows without a root, whatever the number of processes
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = whole(torch.nn.utils.clip_grad_norm_(self._named.values(), self.schedule.gradient_clip))
        if not bool(ahead.loss.isfinite() & norm.isfinite()):
            raise DataError(
                "The loss is no longer a number",
                where=f"optimizer step {self.step}, rows {', '.join(self._rows(batches))}",
                expected="a finite loss and finite gradients",
                got=f"loss {float(ahead.loss.detach())}, gradient norm {float(norm)}",
                do="look at these rows' states (`dvc repro gate-training` checks them), or lower train.learning_rate",
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        self._optimizer.step()
        self.step += 1
        weight = max(1 / _AVERAGE_OVER, 1 / (1 + self.step))
        for name, parameter in self._named.items():
            self.average[name].lerp_(parameter.detach(), weight)
        return ahead

    def _rows(self, batches: Sequence[PackedBatch]) -> list[str]:
        """The step's rows, of all processes."""
        return [r for told in self.group.gather([r for b in batches for r in b.row_ids]) for r in told]

    def averaged(self) -> Eagle3:
        """The draft with its averaged weights: what is evaluated and exported."""
        with self.draft.embedding.device:  # else its parameters are made on the CPU, and stay there
            copy = Eagle3(self.draft.config, self.draft.embedding)
        copy.load_state_dict(wholes(self.draft.state_dict() | self.average))
        return copy.requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        """Weights, averaged weights and optimizer state by name, as they are now."""
        found = {f"weights.{n}": p.detach() for n, p in self._named.items()}
        found |= {f"average.{n}": t for n, t in self.average.items()}
        for name, parameter in self._named.items():
            found |= {f"{key}.{name}": t for key, t in self._optimizer.state[parameter].items()}
        return wholes(found)

    def load(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Go on from `tensors` as `tensors()` gave them after `step` steps."""
        self.step = step
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(part_like(tensors[f"weights.{name}"], parameter))
                self.average[name].copy_(part_like(tensors[f"average.{name}"], parameter))
                state = {key: tensors[f"{key}.{name}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {key: part_like(t, parameter) for key, t in state.items()}
