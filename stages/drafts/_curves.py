"""What a run shows of itself while it trains, as DVC plots it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from stages.contracts.evidence import AcceptLength
from stages.contracts.files import Fact, write_whole
from stages.drafts._training import Ahead

_SHOWN_STEPS = 10  # a line of the training curve averages this many optimizer steps


class HeldOut(Fact):
    """Held-out figures of one draft: mean KL in nats over roots, and accept length."""

    loss: float
    overall: AcceptLength
    by_domain: dict[str, AcceptLength]


class Curves:
    """What DVC plots: training.csv (a line every few steps, means over them) and held_out.csv (a line an evaluation)."""

    def __init__(self, steps_ahead: int, state: dict[str, Any] | None = None) -> None:
        self.training: list[dict[str, float]] = []
        self.held_out: list[dict[str, float]] = []
        self._sums = [0.0] * (2 + 2 * steps_ahead)  # steps, loss, hits and tries by draft step, since the last line
        if state:
            self.training, self.held_out, self._sums = state["training"], state["held_out"], state["sums"]

    def state(self) -> dict[str, Any]:
        return {"training": self.training, "held_out": self.held_out, "sums": self._sums}

    def trained(self, step: int, rate: float, loss: float, ahead: Ahead) -> None:
        """After `step` optimizer steps."""
        self._sums = [a + b for a, b in zip(self._sums, (1, loss, *ahead.hits, *ahead.tried), strict=True)]
        if step % _SHOWN_STEPS:
            return
        steps, total, *counts = self._sums
        hits, tried = counts[: len(ahead.hits)], counts[len(ahead.hits) :]
        accuracy = {f"accuracy_{i}": h / max(1, t) for i, (h, t) in enumerate(zip(hits, tried, strict=True), start=1)}
        self.training.append({"step": step, "loss": total / steps, "learning_rate": rate, **accuracy})
        self._sums = [0.0] * len(self._sums)

    def measured(self, step: int, found: HeldOut) -> None:
        """After an evaluation."""
        domains = {f"accept_length_{name}": a.accept_length for name, a in found.by_domain.items()}
        self.held_out.append(
            {"step": step, "loss": found.loss, "accept_length": found.overall.accept_length, **domains}
        )

    def write(self, folder: Path) -> None:
        for name, lines in (("training", self.training), ("held_out", self.held_out)):
            text = io.StringIO()
            columns = ["step", "loss", *sorted(set(lines[0] if lines else ()) - {"step", "loss"})]
            writer = csv.DictWriter(text, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: v if k == "step" else round(v, 6) for k, v in line.items()} for line in lines)
            write_whole(folder / f"{name}.csv", text.getvalue().encode())
