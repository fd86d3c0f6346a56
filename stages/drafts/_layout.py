"""Who is computed and who sees whom in training-time test: the roots of a batch, by step, and the rows they are in.

Shape suffixes: T tokens of the batch, K keys (pairs from the target's states), N queries of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One row with roots: its keys in the key list, and of every step its queries in that step's list."""

    keys: slice
    queries: tuple[slice, ...]


@dataclass(frozen=True)
class Layout:
    """Who is computed and who sees whom. All indices point into the flat batch unless said.

    Args:
        keys_K: pairs that give keys and values: each row's, up to its last root.
        roots: of every step, the roots alive [N].
        keep: of every step from 1, which of the former step's queries live on (indices into them).
        positions_T: position of every token in its row.
        spans: the rows with roots.
    """

    keys_K: Tensor
    roots: tuple[Tensor, ...]
    keep: tuple[Tensor, ...]
    positions_T: Tensor
    spans: tuple[Span, ...]


def lay_out(loss_mask_T: Tensor, lengths: Sequence[int], steps: int) -> Layout:
    """Find the roots by the serve-exact mask and what they need."""
    device = loss_mask_T.device
    sizes = torch.tensor(lengths, device=device)
    row_T = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)
    starts = sizes.cumsum(0) - sizes
    positions_T = torch.arange(len(loss_mask_T), device=device) - starts[row_T]
    left_T = sizes[row_T] - positions_T  # tokens from here to the row's end, this one included

    def ahead(by: int) -> Tensor:
        moved = torch.zeros_like(loss_mask_T)
        if by < len(loss_mask_T):
            moved[:-by] = loss_mask_T[by:]
        return moved & (left_T > by)

    alive = [ahead(1) & ahead(2)]
    for i in range(1, steps):
        alive.append(alive[-1] & ahead(2 + i))
    roots = tuple(a.nonzero()[:, 0] for a in alive)
    last_root = torch.full((len(lengths),), -1, device=device)
    last_root.scatter_reduce_(0, row_T[roots[0]], positions_T[roots[0]], "amax")
    keys_K = (positions_T <= last_root[row_T]).nonzero()[:, 0]
    keep = tuple(now[before].nonzero()[:, 0] for before, now in zip(roots[:-1], alive[1:], strict=True))
    counts = [torch.bincount(row_T[x], minlength=len(lengths)).tolist() for x in (keys_K, *roots)]
    return Layout(keys_K, roots, keep, positions_T, tuple(_spans(counts)))


def _spans(counts: list[list[int]]) -> Iterator[Span]:
    at = [0] * len(counts)
    for row in zip(*counts, strict=True):
        slices = [slice(a, a + n) for a, n in zip(at, row, strict=True)]
        at = [s.stop for s in slices]
        if row[0]:
            yield Span(slices[0], tuple(slices[1:]))


def cut(layout: Layout, lengths: Sequence[int], step: int, on_N: Tensor) -> Layout:
    """The layout in which of step `step`'s queries only those go on for which `on_N` holds."""
    roots, keep = list(layout.roots), list(layout.keep)
    lives_T = torch.zeros_like(layout.positions_T, dtype=torch.bool)
    lives_T[roots[step][on_N]] = True
    for later in range(step + 1, len(roots)):
        roots[later] = roots[later][lives_T[roots[later]]]
        keep[later - 1] = torch.searchsorted(roots[later - 1], roots[later])
    ends = torch.tensor(lengths, device=on_N.device).cumsum(0)
    rows = [torch.searchsorted(ends, x, right=True) for x in (layout.keys_K, *roots)]
    counts = [torch.bincount(row, minlength=len(lengths)).tolist() for row in rows]
    return replace(layout, roots=tuple(roots), keep=tuple(keep), spans=tuple(_spans(counts)))
