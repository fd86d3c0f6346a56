"""One training run from its first step, or from a resume point, to the best draft it found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from stages.contracts.files import Fact
from stages.contracts.progress import progress
from stages.drafts._curves import Curves, HeldOut
from stages.drafts._module import Eagle3
from stages.drafts._resume import ResumePoints
from stages.drafts._trainer import BatchOrder, Trainer
from stages.drafts._training import Ahead, PackedBatch


class Best(Fact):
    """The best draft so far by held-out accept length; its weights are kept beside."""

    step: int
    roots_seen: int
    train_loss: float
    found: HeldOut


class Session:
    """One training run: what has been done, and how to go on from a resume point.

    Args:
        points: where resume points are kept.
        order: the rows of every step.
        pack: makes a batch of row numbers.
        evaluate: held-out figures of a draft.
        evaluate_every, checkpoint_every: in optimizer steps.
    """

    def __init__(
        self,
        trainer: Trainer,
        points: ResumePoints,
        order: BatchOrder,
        pack: Callable[[Sequence[int]], PackedBatch],
        evaluate: Callable[[Eagle3], HeldOut],
        *,
        evaluate_every: int,
        checkpoint_every: int,
    ) -> None:
        self.trainer, self.points, self.order, self.pack, self.evaluate = trainer, points, order, pack, evaluate
        self.evaluate_every, self.checkpoint_every = evaluate_every, checkpoint_every
        self.curves, self.roots_seen = Curves(trainer.schedule.steps_ahead), 0
        self.best: Best | None = None
        self.best_weights: dict[str, Tensor] = {}

    def resume(self) -> None:
        """Go on from the last resume point, when there is one."""
        if (point := self.points.load()) is None:
            return
        step, tensors, state = point
        self.best_weights = {n.removeprefix("best."): t for n, t in tensors.items() if n.startswith("best.")}
        self.trainer.load(step, tensors)
        self.curves, self.roots_seen = Curves(self.trainer.schedule.steps_ahead, state["curves"]), state["roots_seen"]
        self.best = Best.model_validate(state["best"]) if state["best"] else None
        print(f"train: resumed after step {step}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write a resume point."""
        state = {"curves": self.curves.state(), "roots_seen": self.roots_seen}
        best = self.best.model_dump(mode="json") if self.best else None
        kept = {f"best.{n}": t for n, t in self.best_weights.items()}
        self.points.save(self.trainer.step, self.trainer.tensors() | kept, state | {"best": best})

    def measure(self, loss: float) -> HeldOut:
        """Evaluate the averaged weights on the held-out rows; keep them when they are the best so far."""
        draft = self.trainer.averaged()
        found = self.evaluate(draft)
        self.curves.measured(self.trainer.step, found)
        if self.best is None or found.overall.accept_length > self.best.found.overall.accept_length:
            self.best = Best(step=self.trainer.step, roots_seen=self.roots_seen, train_loss=loss, found=found)
            self.best_weights = {n: t.clone() for n, t in draft.state_dict().items()}
        return found

    def run(self) -> Best:
        """Train to the end, or from the resume point to the end."""
        steps, started, seen, held_out = self.trainer.schedule.optimizer_steps, time.monotonic(), 0, ""
        with progress(steps, "train", "steps") as advance:
            advance(self.trainer.step)
            while self.trainer.step < steps:
                ahead, loss = self._step()
                seen += len(ahead.roots)
                last = self.trainer.step == steps
                if last or self.trainer.step % self.evaluate_every == 0:
                    found = self.measure(loss)
                    held_out = f"held-out accept length {found.overall.accept_length:.3f} "
                if self.trainer.step % self.checkpoint_every == 0 and not last:
                    self.save()
                advance(1, f"loss {loss:.3f} {held_out}{seen / (time.monotonic() - started):.0f} tokens/s")
        assert self.best is not None
        return self.best

    def _step(self) -> tuple[Ahead, float]:
        rate = self.trainer.schedule.rate(self.trainer.step)
        ahead = self.trainer.train(self.pack(self.order(self.trainer.step)))
        loss = float(ahead.loss.detach())
        self.roots_seen += len(ahead.roots)
        self.curves.trained(self.trainer.step, rate, loss, ahead)
        return ahead, loss

    def best_draft(self) -> Eagle3:
        """The draft to export."""
        draft = self.trainer.averaged()
        draft.load_state_dict(self.best_weights)
        return draft
