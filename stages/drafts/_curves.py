"""What a run shows of itself while it trains, as DVC plots it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from stages.contracts.evidence import AcceptLength
from stages.contracts.files import Fact, write_whole
from stages.drafts._training import Ahead
from stages.drafts._watch import Speed

_SHOWN_STEPS = 10  # a line of the training curve averages this many optimizer steps


class HeldOut(Fact):
    """Held-out figures of one draft: mean KL in nats over roots, and accept length.

    by_row: tokens and verifications of every held-out answer, so that two drafts can be compared answer by answer;
    train_like: accept length on a sample of the training rows, simulated the same way: what it is above `overall` is
    what the draft knows by heart.
    """

    loss: float
    overall: AcceptLength
    by_domain: dict[str, AcceptLength]
    by_row: tuple[tuple[int, int], ...] = ()
    train_like: AcceptLength | None = None


class Curves:
    """What DVC plots: training.csv (a line every few steps, means over them), held_out.csv (a line an evaluation) and
    speed.csv (measured, so no two runs agree on it)."""

    def __init__(self, steps_ahead: int, state: dict[str, Any] | None = None) -> None:
        self.training: list[dict[str, float]] = []
        self.held_out: list[dict[str, float]] = []
        self.speed: list[dict[str, float]] = []
        self._since = Speed()
        self._sums = [0.0] * (2 + 2 * steps_ahead)  # steps, loss, hits and tries by draft step, since the last line
        if state:
            self.training, self.held_out, self._sums = state["training"], state["held_out"], state["sums"]
            self.speed = state["speed"]

    def state(self) -> dict[str, Any]:
        return {"training": self.training, "held_out": self.held_out, "speed": self.speed, "sums": self._sums}

    def trained(self, step: int, rate: float, loss: float, ahead: Ahead, waited_s: float, took_s: float) -> None:
        """After `step` optimizer steps, the last of which took `took_s`, `waited_s` of it for its batch."""
        self._since.add(ahead.tried[0], waited_s, took_s)
        self._sums = [a + b for a, b in zip(self._sums, (1, loss, *ahead.hits, *ahead.tried), strict=True)]
        if step % _SHOWN_STEPS:
            return
        steps, total, *counts = self._sums
        hits, tried = counts[: len(ahead.hits)], counts[len(ahead.hits) :]
        accuracy = {f"accuracy_{i}": h / max(1, t) for i, (h, t) in enumerate(zip(hits, tried, strict=True), start=1)}
        self.training.append({"step": step, "loss": total / steps, "learning_rate": rate, **accuracy})
        self._sums = [0.0] * len(self._sums)
        self.speed.append(self._since.line(step))

    def measured(self, step: int, found: HeldOut) -> None:
        """After an evaluation."""
        domains = {f"accept_length_{name}": a.accept_length for name, a in found.by_domain.items()}
        overall = {"accept_length": found.overall.accept_length, "low": found.overall.low, "high": found.overall.high}
        known = {"train_like": found.train_like.accept_length} if found.train_like else {}
        places = {f"accepted_{i}": share for i, share in enumerate(found.overall.by_position, start=1)}
        self.held_out.append({"step": step, "loss": found.loss, **overall, **domains, **known, **places})

    def write(self, folder: Path) -> None:
        for name, lines in (("training", self.training), ("held_out", self.held_out), ("speed", self.speed)):
            text = io.StringIO()
            first = [] if name == "speed" else ["loss"]
            columns = ["step", *first, *sorted(set(lines[0] if lines else ()) - {"step", *first})]
            writer = csv.DictWriter(text, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: v if k == "step" else round(v, 6) for k, v in line.items()} for line in lines)
            write_whole(folder / f"{name}.csv", text.getvalue().encode())
