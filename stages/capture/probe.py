"""The layer probe: which point of the target does a stored or fed state really hold? Told by value, for shapes cannot tell.

The target runs again over a few rows and keeps every point 0..n; each slot is compared with all of them. The distance is
relative L2 per position, |slot - point| / |point|, taken as the median over a row's positions after the first: position 0
is an attention sink whose norm drowns everything. Rows are judged one by one and the one that disagrees most speaks for
all: a median over all rows would let a minority of wrong ones pass. States of a prefix do not depend on what follows, so
long rows are cut; memory stays at (n+1) states of one row.

L tokens of a row, S slots, H hidden size, N = n+1 points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.contracts.errors import DataError

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

MOST_TOKENS = 512
FIRST = 1  # positions before this one are left out of every median


class ProbeRow(NamedTuple):
    """input_ids [L] and loss_mask [L] of a row, and the states [L, S, H] that are held to be the target's; kept, bool
    [L, S]: which of them are stored, all of them when None."""

    row_id: str
    input_ids: Tensor
    loss_mask: Tensor
    states: Tensor
    kept: Tensor | None = None


@dataclass(frozen=True)
class SlotProbe:
    """A slot's record: of all rows compared, the one that disagrees most. Columns, as pandas.DataFrame(map(vars, probes))
    has them:

    slot: 0-based place in the stored or fed states; claimed_point: what it is said to hold; nearest_point: the point of
    smallest distance over 0..n; claimed_distance, nearest_distance: median relative L2; next_best_distance: the smallest
    over all points but the claimed one, so next_best / claimed is the margin; claimed_p99_distance: what 99 of 100
    positions keep to, of whichever row it is largest in, for a median does not see a minority of positions that are
    another row's; after_norm_distance: to the last state *after* the final norm, which is no point; rows, tokens: how many
    were compared (tokens without each row's first).
    Distances are infinite where the slot holds NaN or Inf.
    """

    slot: int
    claimed_point: int
    nearest_point: int
    claimed_distance: float
    claimed_p99_distance: float
    nearest_distance: float
    next_best_distance: float
    after_norm_distance: float
    rows: int
    tokens: int


def apart(stored_LH: Tensor, state_LH: Tensor, rounded_LH: Tensor | None = None) -> Tensor:
    """Relative L2 [L] of each position; infinite where the stored state is not finite. rounded: the state as a store that
    rounds gives it back, where like is to be compared with like."""
    stored, state = stored_LH.float(), state_LH.float()
    far = (stored - (state if rounded_LH is None else rounded_LH.float())).norm(dim=-1) / state.norm(dim=-1).clamp_min(
        1e-30
    )
    return torch.where(far.isfinite(), far, torch.inf)


@torch.inference_mode()
def distances(target: Decoder, ids: Tensor, slots: Tensor, stored: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Relative L2 [L-1, S, N+1] of slots [L, S, H] to every point; the last column is the state after the final norm.

    `stored` makes of an auxiliary state what a store that rounds it gives back: like is compared with like.
    """
    n, eps = target.config.layers, target.config.eps
    stream = target.packed(ids.long().to(target.device), [len(ids)], range(n + 1))
    after = F.rms_norm(stream.last, (stream.last.shape[-1],), target.norm, eps)
    slots_LSH = slots[FIRST:].to(target.device)
    states = [*(stream.states[p] for p in range(n + 1)), after]
    columns = []
    for state in states:
        state_L1H = state[FIRST:, None]
        far_LS = apart(slots_LSH, state_L1H)
        if stored is not None:
            far_LS[:, :-1] = apart(slots_LSH[:, :-1], state_L1H, stored(state_L1H.float()))
        columns.append(far_LS)
    return torch.stack(columns, -1).cpu()


def high(distance_L: Tensor) -> float:
    """The distance that 99 of 100 positions keep to; of fewer than 100 positions the largest. NaN is no position; without
    any, 0."""
    distance_L = distance_L[~distance_L.isnan()]
    if not len(distance_L):
        return 0.0
    return float(distance_L.sort().values[math.ceil(0.99 * len(distance_L)) - 1])


def nearest_points(
    target: Decoder,
    ids: Sequence[Tensor],
    slots: Sequence[Tensor],
    claimed: Sequence[int],
    max_tokens: int = MOST_TOKENS,
    kept: Sequence[Tensor | None] | None = None,
    stored: Callable[[Tensor], Tensor] | None = None,
) -> list[SlotProbe]:
    """Name the point that each slot holds, from rows that start at position 0: each by the row that disagrees most.

    Args:
        ids: token ids [L] of each row.
        slots: states [L, S, H] of each row, as stored or as an engine feeds them.
        claimed: the point that each slot is said to hold.
        max_tokens: tokens of a row that are compared; at least 2 are needed.
        kept: which states of a row are stored, bool [L, S] or None for all; the others are left out.
        stored: see `distances`.

    Raises:
        DataError: no row of two tokens.
    """
    per_row = [
        _only(distances(target, i[:max_tokens], s[:max_tokens], stored), k)
        for i, s, k in zip(ids, slots, kept or [None] * len(ids), strict=True)
        if len(i) > 1
    ]
    if not per_row:
        raise DataError("No row to probe", expected="a row of two tokens or more", got=f"{len(ids)} rows, none as long")
    tokens = sum(len(row) for row in per_row)
    medians_RSN = [row.nanmedian(0).values.tolist() for row in per_row]
    highs_S = [max(high(row[:, slot, at]) for row in per_row) for slot, at in enumerate(claimed)]
    return [_slot(slot, at, _kept_rows(medians_RSN, slot), highs_S[slot], tokens) for slot, at in enumerate(claimed)]


def _only(apart_LSN: Tensor, kept: Tensor | None) -> Tensor:
    """NaN, which no median counts, for what is not stored."""
    if kept is None:
        return apart_LSN
    return apart_LSN.masked_fill(~kept[FIRST : FIRST + len(apart_LSN), :, None], torch.nan)


def _kept_rows(medians_RSN: list[list[list[float]]], slot: int) -> list[list[float]]:
    """A slot's medians, of rows that store it at all; of no row that does, infinity."""
    found = [row[slot] for row in medians_RSN if row[slot][0] == row[slot][0]]
    return found or [[torch.inf] * len(medians_RSN[0][slot])]


def _slot(slot: int, claimed: int, medians_RN: list[list[float]], p99: float, tokens: int) -> SlotProbe:
    """The record of the row that disagrees most: one whose nearest point is another first, then by distance."""

    def nearest_of(median_N: list[float]) -> int:
        points = median_N[:-1]
        return min(range(len(points)), key=points.__getitem__)

    worst = max(medians_RN, key=lambda median_N: (nearest_of(median_N) != claimed, median_N[claimed]))
    *points, after = worst
    nearest = nearest_of(worst)
    return SlotProbe(
        slot=slot,
        claimed_point=claimed,
        nearest_point=nearest,
        claimed_distance=points[claimed],
        claimed_p99_distance=p99,
        nearest_distance=points[nearest],
        next_best_distance=min(d for p, d in enumerate(points) if p != claimed),
        after_norm_distance=after,
        rows=len(medians_RN),
        tokens=tokens,
    )


def probe_rows(
    target: Decoder,
    rows: Sequence[ProbeRow],
    points: Sequence[int],
    max_tokens: int = MOST_TOKENS,
    stored: Callable[[Tensor], Tensor] | None = None,
) -> list[SlotProbe]:
    """Probe stored rows: a record a slot, the last slot being the last state, claimed to be point n."""
    claimed = (*sorted(points), target.config.layers)
    ids, slots, kept = ([getattr(r, name) for r in rows] for name in ("input_ids", "states", "kept"))
    return nearest_points(target, ids, slots, claimed, max_tokens, kept, stored)
