"""Rows that will be asked for one by one and are run together, for a target whose layers are read from files anew in every
pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor


class Cut(Protocol):
    """States of rows laid end to end."""

    def cut(self: Whole, start: int, end: int) -> Whole: ...


Whole = TypeVar("Whole", bound=Cut)
Run = Callable[[Tensor, Sequence[int], frozenset[int]], Whole]


class Ahead(Generic[Whole]):
    """Expected rows and, of those run last, the states."""

    def __init__(self, rows: Sequence[Tensor], tokens: int) -> None:
        self._rows = [tuple(row.tolist()) for row in rows]
        self._tokens = tokens
        self._held: dict[tuple[int, ...], Whole] = {}
        self._points: frozenset[int] = frozenset()

    def take(self, ids: Tensor, points: frozenset[int], run: Run[Whole]) -> Whole:
        """The states of one row; when it is expected and not held, it is run with the expected rows that follow it."""
        row = tuple(ids.tolist())
        if row not in self._rows:
            return run(ids, [len(row)], points)
        if row not in self._held or not points <= self._points:
            self._held, self._points = {}, points
            batch = self._from(row)
            joined = torch.tensor([t for r in batch for t in r], device=ids.device)
            whole, at = run(joined, [len(r) for r in batch], points), 0
            for r in batch:
                self._held[r] = whole.cut(at, at + len(r))
                at += len(r)
        return self._held[row]

    def _from(self, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        """This row and those after it, no more tokens together than are held, and no row twice."""
        batch, tokens = [row], len(row)
        for other in self._rows[self._rows.index(row) + 1 :]:
            if tokens + len(other) > self._tokens:
                break
            if other not in batch:
                batch.append(other)
                tokens += len(other)
        return batch
