"""A progress bar with time left, for whatever takes longer than a few seconds. Plain lines where there is no terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator

_PLAIN_EVERY_S = 10.0


@contextlib.contextmanager
def progress(total: float, label: str, unit: str = "") -> Generator[Callable[..., None], None, None]:
    """Yield `advance(amount, note="")`; shows done, total, rate and time left on stderr.

    In a terminal a bar is redrawn in place; elsewhere (dvc, CI, Prefect logs) a line is printed every ten seconds.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn(unit + " {task.fields[note]}"))
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total, note="")

            def redraw(amount: float = 1, note: str = "") -> None:
                bar.update(task, advance=amount, note=note)

            yield redraw
        return
    started = shown = time.monotonic()
    done = 0.0

    def advance(amount: float = 1, note: str = "") -> None:
        nonlocal done, shown
        done += amount
        now = time.monotonic()
        if now - shown >= _PLAIN_EVERY_S and done:
            shown = now
            left = (now - started) / done * max(total - done, 0)
            print(f"{label}: {done:.0f}/{total:.0f} {unit} {note} · {left:.0f} s left", file=sys.stderr, flush=True)

    yield advance
