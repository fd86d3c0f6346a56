"""What a run keeps an eye on: a loss that jumps, and where the time goes."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence

import torch

from stages.contracts.errors import DataError

_LOOK_BACK = 32  # optimizer steps whose loss is what is usual
_AT_LEAST = 16  # of them, before anything can be called a jump
_KIB = 1024


_LEAST_RISE = 0.1  # nats above what is usual: where that is about 0, rounding alone would be many times it


class LossWatch:
    """Stops a run whose loss jumps. A step's loss is that of the weights before its update: what the update before it did
    to them shows only here, so a resume point counts as sound once the step after it was seen (Session).

    Args:
        max_jump: times the median loss of the last steps that a step's loss may reach; 0 never stops.
    """

    def __init__(self, max_jump: float) -> None:
        self.max_jump = max_jump
        self.recent: list[float] = []
        self._before: Sequence[str] = ()  # rows of the step before

    def see(self, step: int, loss: float, rows: Sequence[str]) -> None:
        """After optimizer step `step` (0-based) on `rows`.

        Raises:
            DataError: the loss jumped; the rows are named.
        """
        usual = statistics.median(self.recent) if len(self.recent) >= _AT_LEAST else None
        if self.max_jump and usual is not None and loss > max(self.max_jump * usual, usual + _LEAST_RISE):
            before = f"; the update before it was of rows {', '.join(self._before)}" if self._before else ""
            raise DataError(
                "The loss jumped: training came apart, or these rows are not like the others",
                where=f"optimizer step {step}, rows {', '.join(rows)}{before}",
                expected=f"at most {self.max_jump:g} times {usual:.3f}, the median of the last {len(self.recent)} steps "
                "(train.max_loss_jump)",
                got=f"{loss:.3f}",
                do="look at these rows (`python -m stages.glance data/prepared <row id>`) or lower train.learning_rate; "
                "the resume point that is left is from before, and `dvc repro train` goes on from it",
            )
        self.recent, self._before = [*self.recent[1 - _LOOK_BACK :], loss], rows


class Speed:
    """Seconds and supervised tokens since the last line; evaluations and resume points are left out."""

    def __init__(self) -> None:
        self._tokens, self._took_s, self._waited_s = 0, 0.0, 0.0

    def add(self, tokens: int, waited_s: float, took_s: float) -> None:
        """One optimizer step: `took_s` in all, `waited_s` of it for its batch."""
        self._tokens += tokens
        self._took_s += took_s
        self._waited_s += waited_s

    def line(self, step: int) -> dict[str, float]:
        """What stands in speed.csv for the steps since the last line."""
        tokens, took, waited = self._tokens, max(self._took_s, 1e-9), self._waited_s
        self._tokens, self._took_s, self._waited_s = 0, 0.0, 0.0
        shares = {"tokens_per_s": tokens / took, "waiting_share": waited / took}
        return {"step": step, **shares, "peak_memory_mb": peak_memory_mb()}


def peak_memory_mb() -> float:
    """The most that this process has held so far, on the GPU where there is one in use, in MiB."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / _KIB / _KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _KIB
