"""One training run from its first step, or from a resume point, to the best draft it found."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.contracts.errors import DataError, Refusal
from stages.contracts.files import Fact
from stages.contracts.progress import progress
from stages.drafts._curves import Curves, HeldOut
from stages.drafts._group import share_out
from stages.drafts._module import Eagle3
from stages.drafts._read_ahead import ReadAhead
from stages.drafts._resume import ResumePoints
from stages.drafts._trainer import BatchOrder, Trainer
from stages.drafts._training import Ahead, PackedBatch
from stages.drafts._watch import LossWatch


class Best(Fact):
    """The best draft so far by held-out accept length; its weights are kept beside."""

    step: int
    roots_seen: int
    train_loss: float
    found: HeldOut


@dataclass(frozen=True)
class Rhythm:
    """When a run does what, and when it ends early.

    Args:
        evaluate_every, checkpoint_every: in optimizer steps.
        stop_after: evaluations in a row without an improvement that end the run; 0 = never.
        max_loss_jump: see LossWatch.
        accumulate: pieces in which each process computes a step's rows, one after the other.
    """

    evaluate_every: int
    checkpoint_every: int
    stop_after: int = 0
    max_loss_jump: float = 0.0
    accumulate: int = 1


class Session:
    """One training run: what has been done, and how to go on from a resume point.

    Args:
        points: where resume points are kept.
        order: the rows of every step.
        row_ids: of every row, by its number.
        pack: makes a batch of row numbers.
        evaluate: held-out figures of a draft.
        improves: whether the second of two evaluations is better than the first beyond chance.
        read_ahead: make the next step's batches while one is computed.
    """

    def __init__(
        self,
        trainer: Trainer,
        points: ResumePoints,
        order: BatchOrder,
        row_ids: Sequence[str],
        pack: Callable[[Sequence[int]], PackedBatch],
        evaluate: Callable[[Eagle3], HeldOut],
        improves: Callable[[HeldOut, HeldOut], bool],
        rhythm: Rhythm,
        *,
        read_ahead: bool = False,
    ) -> None:
        self.trainer, self.points, self.order, self.row_ids = trainer, points, order, row_ids
        self.pack, self.evaluate, self.improves, self.rhythm = pack, evaluate, improves, rhythm
        self.read_ahead = read_ahead
        self.show: Callable[[Curves], None] = lambda _: None
        self.curves, self.roots_seen = Curves(trainer.schedule.steps_ahead), 0
        self.watch = LossWatch(rhythm.max_loss_jump)
        self.best: Best | None = None
        self.best_weights: dict[str, Tensor] = {}
        self.reference: HeldOut | None = None  # the last evaluation that was an improvement
        self.stale = 0  # evaluations since
        self._fresh_point: int | None = None  # the step of a resume point whose weights no loss has told of yet

    def resume(self) -> None:
        """Go on from the last resume point, when there is one."""
        if (point := self.points.load()) is None:
            return
        step, tensors, state = point
        self.best_weights = {n.removeprefix("best."): t for n, t in tensors.items() if n.startswith("best.")}
        self.trainer.load(step, tensors)
        self.curves, self.roots_seen = Curves(self.trainer.schedule.steps_ahead, state["curves"]), state["roots_seen"]
        self.best = Best.model_validate(state["best"]) if state["best"] else None
        self.reference = HeldOut.model_validate(state["reference"]) if state["reference"] else None
        self.stale, self.watch.recent = state["stale"], state["recent"]
        self._fresh_point = step
        self._say(f"resumed after step {step}")

    def save(self) -> None:
        """Write a resume point; the first process does."""
        tensors = self.trainer.tensors()
        if self.trainer.group.first:
            state = {"curves": self.curves.state(), "roots_seen": self.roots_seen}
            state |= {"stale": self.stale, "recent": self.watch.recent}
            for name, fact in (("best", self.best), ("reference", self.reference)):
                state[name] = fact.model_dump(mode="json") if fact else None
            kept = {f"best.{n}": t for n, t in self.best_weights.items()}
            self.points.save(self.trainer.step, tensors | kept, state)
        self._fresh_point = self.trainer.step
        self.trainer.group.wait()

    def measure(self, loss: float) -> HeldOut:
        """Evaluate the averaged weights on the held-out rows; keep them when they are the best so far."""
        draft = self.trainer.averaged()
        found = self.evaluate(draft)
        for split, pairs in (("train", self.roots_seen), ("held-out", found.overall.verifications)):
            if not pairs:
                raise Refusal(
                    f"No {split} row has a pair that a draft could be asked for",
                    where=f"the merged rows, after optimizer step {self.trainer.step}",
                    expected="two supervised tokens side by side, somewhere in the rows",
                    do="look at their masks (`python -m stages.glance data/prepared`); gate-extraction refuses such rows",
                )
        self.curves.measured(self.trainer.step, found)
        if self.best is None or found.overall.accept_length > self.best.found.overall.accept_length:
            self.best = Best(step=self.trainer.step, roots_seen=self.roots_seen, train_loss=loss, found=found)
            self.best_weights = {n: t.clone() for n, t in draft.state_dict().items()}
        better = self.reference is None or self.improves(self.reference, found)
        self.stale = 0 if better else self.stale + 1
        self.reference = found if better else self.reference
        return found

    def run(self) -> Best:
        """Train to the end, or until nothing improves, from the start or the resume point."""
        steps, started, seen, held_out = self.trainer.schedule.optimizer_steps, time.monotonic(), 0, ""
        with self._progress(steps) as advance, ReadAhead(self._read, steps, thread=self.read_ahead) as batches:
            advance(self.trainer.step)
            while self.trainer.step < steps and not self._tired:
                ahead, loss = self._step(batches)
                seen += ahead.tried[0]
                last = self.trainer.step == steps
                if last or self.trainer.step % self.rhythm.evaluate_every == 0:
                    found = self.measure(loss)
                    held_out = f"held-out accept length {found.overall.accept_length:.3f} "
                self.show(self.curves)
                if self.trainer.step % self.rhythm.checkpoint_every == 0 and not last:
                    self.save()
                advance(1, f"loss {loss:.3f} {held_out}{seen / (time.monotonic() - started):.0f} tokens/s")
        if self._tired:
            self._say(f"no improvement in {self.stale} evaluations; stopped after step {self.trainer.step}")
        assert self.best is not None
        return self.best

    @property
    def _tired(self) -> bool:
        return 0 < self.rhythm.stop_after <= self.stale

    def _read(self, step: int) -> tuple[list[int], list[PackedBatch]]:
        """The step's rows, of all processes, and this one's batches of them."""
        rows, group = self.order(step), self.trainer.group
        shares = share_out(rows, self.order.lengths, group.size * self.rhythm.accumulate)
        return rows, [self.pack(share) for share in shares[group.rank :: group.size] if share]

    def _step(self, batches_of: ReadAhead[tuple[list[int], list[PackedBatch]]]) -> tuple[Ahead, float]:
        step, started = self.trainer.step, time.monotonic()
        rate = self.trainer.schedule.rate(step)
        rows, batches = batches_of(step)
        waited = time.monotonic() - started
        ahead = self.trainer.train(*batches)
        loss = float(ahead.loss.detach())
        self._look(step, loss, [self.row_ids[row] for row in rows])
        self.roots_seen += ahead.tried[0]
        self.curves.trained(self.trainer.step, rate, loss, ahead, waited, time.monotonic() - started)
        return ahead, loss

    def _look(self, step: int, loss: float, rows: list[str]) -> None:
        """Stop where the loss jumped. The loss tells of the weights before this step: those of a resume point made then."""
        fresh, self._fresh_point = self._fresh_point == step, None
        try:
            self.watch.see(step, loss, rows)
        except DataError:
            if fresh and self.trainer.group.first:
                self.points.settle(sound=False)
            raise
        if fresh and self.trainer.group.first:
            self.points.settle(sound=True)

    def best_draft(self) -> Eagle3:
        """The draft to export."""
        draft = self.trainer.averaged()
        draft.load_state_dict(self.best_weights)
        return draft

    def _say(self, words: str) -> None:
        if self.trainer.group.first:
            print(f"train: {words}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _progress(self, steps: int) -> Generator[Callable[..., None], None, None]:
        if not self.trainer.group.first:
            yield lambda *_: None
            return
        with progress(steps, "train", "steps") as advance:
            yield advance
