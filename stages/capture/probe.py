"""The layer probe: which point of the target does a stored or fed state really hold? Told by value, for shapes cannot tell.

The target runs again over a few rows and keeps every point 0..n; each slot is compared with all of them. The distance is
relative L2 per position, |slot - point| / |point|, taken as the median over a row's positions after the first: position 0
is an attention sink whose norm drowns everything. Rows are judged one by one and the one that disagrees most speaks for
all: a median over all rows would let a minority of wrong ones pass. States of a prefix do not depend on what follows, so
long rows are cut; memory stays at (n+1) states of one row.

L tokens of a row, S slots, H hidden size, N = n+1 points.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.contracts.errors import DataError

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

_MAX_TOKENS = 512
_FIRST = 1  # positions before this one are left out of every median


class ProbeRow(NamedTuple):
    """input_ids [L] and loss_mask [L] of a row, and the states [L, S, H] that are held to be the target's."""

    row_id: str
    input_ids: Tensor
    loss_mask: Tensor
    states: Tensor


@dataclass(frozen=True)
class SlotProbe:
    """A slot's record: of all rows compared, the one that disagrees most. Columns, as pandas.DataFrame(map(vars, probes))
    has them:

    slot: 0-based place in the stored or fed states; claimed_point: what it is said to hold; nearest_point: the point of
    smallest distance over 0..n; claimed_distance, nearest_distance: median relative L2; next_best_distance: the smallest
    over all points but the claimed one, so next_best / claimed is the margin; after_norm_distance: to the last state
    *after* the final norm, which is no point; rows, tokens: how many were compared (tokens without each row's first).
    Distances are infinite where the slot holds NaN or Inf.
    """

    slot: int
    claimed_point: int
    nearest_point: int
    claimed_distance: float
    nearest_distance: float
    next_best_distance: float
    after_norm_distance: float
    rows: int
    tokens: int


@dataclass(frozen=True)
class NormProbe:
    """Both readings of the stored last state, before and after the final norm. Columns:

    *_distance: median relative L2 to the target's own last state, read that way; *_agreement: share of supervised
    tokens that the stored state's argmax reproduces when its logits are taken that way; own_agreement: share of positions
    before them at which it is the argmax of the target's own recomputed state; *_nll: mean negative log-likelihood of the
    supervised tokens, nats, and target_nll: by the target's own recomputed state, which the right reading reproduces;
    reading: `before_final_norm` or `after_final_norm`, whichever is nearer in value; rows, tokens:
    rows and supervised tokens judged. A wrong reading may leave the argmax nearly intact and make the distribution too
    sharp or too flat: distance and likelihood tell.
    """

    reading: str
    before_distance: float
    after_distance: float
    before_agreement: float
    after_agreement: float
    own_agreement: float
    before_nll: float
    after_nll: float
    target_nll: float
    rows: int
    tokens: int


@dataclass(frozen=True)
class RowFaults:
    """What one stored row says of itself, without the target. Columns:

    row_id, folder, tokens; dtype: of the states; nan, inf: number of such values; zero_states: number of (token, slot)
    states that are all zero; constant_slots: slots that hold one state for all positions after the first;
    ids_equal, mask_equal: whether ids and mask are those of the prepared row.
    """

    row_id: str
    folder: str
    tokens: int
    dtype: str
    nan: int
    inf: int
    zero_states: int
    constant_slots: int
    ids_equal: bool
    mask_equal: bool


@torch.inference_mode()
def distances(target: Decoder, ids: Tensor, slots: Tensor) -> Tensor:
    """Relative L2 [L-1, S, N+1] of slots [L, S, H] to every point; the last column is the state after the final norm."""
    n, eps = target.config.layers, target.config.eps
    stream = target.packed(ids.long().to(target.device), [len(ids)], range(n + 1))
    after = F.rms_norm(stream.last, (stream.last.shape[-1],), target.norm, eps)
    slots_LSH = slots[_FIRST:].to(target.device).float()
    columns = []
    for state in [*(stream.states[p] for p in range(n + 1)), after]:
        state_L1H = state[_FIRST:, None].float()
        columns.append((slots_LSH - state_L1H).norm(dim=-1) / state_L1H.norm(dim=-1).clamp_min(1e-30))
    return torch.stack(columns, -1).nan_to_num(torch.inf, torch.inf).cpu()


def nearest_points(
    target: Decoder,
    ids: Sequence[Tensor],
    slots: Sequence[Tensor],
    claimed: Sequence[int],
    max_tokens: int = _MAX_TOKENS,
) -> list[SlotProbe]:
    """Name the point that each slot holds, from rows that start at position 0: each by the row that disagrees most.

    Args:
        ids: token ids [L] of each row.
        slots: states [L, S, H] of each row, as stored or as an engine feeds them.
        claimed: the point that each slot is said to hold.
        max_tokens: tokens of a row that are compared; at least 2 are needed.

    Raises:
        DataError: no row of two tokens.
    """
    per_row = [distances(target, i[:max_tokens], s[:max_tokens]) for i, s in zip(ids, slots, strict=True) if len(i) > 1]
    if not per_row:
        raise DataError("No row to probe", expected="a row of two tokens or more", got=f"{len(ids)} rows, none as long")
    tokens = sum(len(row) for row in per_row)
    medians_RSN = [row.median(0).values.tolist() for row in per_row]
    return [_slot(slot, at, [m[slot] for m in medians_RSN], tokens) for slot, at in enumerate(claimed)]


def _slot(slot: int, claimed: int, medians_RN: list[list[float]], tokens: int) -> SlotProbe:
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
        nearest_distance=points[nearest],
        next_best_distance=min(d for p, d in enumerate(points) if p != claimed),
        after_norm_distance=after,
        rows=len(medians_RN),
        tokens=tokens,
    )


def probe_rows(
    target: Decoder, rows: Sequence[ProbeRow], points: Sequence[int], max_tokens: int = _MAX_TOKENS
) -> list[SlotProbe]:
    """Probe stored rows: a record a slot, the last slot being the last state, claimed to be point n."""
    claimed = (*sorted(points), target.config.layers)
    return nearest_points(target, [r.input_ids for r in rows], [r.states for r in rows], claimed, max_tokens)


@torch.inference_mode()
def probe_norm(target: Decoder, rows: Sequence[ProbeRow], max_tokens: int = _MAX_TOKENS) -> NormProbe:
    """Read the last slot of each row before and after the final norm; see NormProbe.

    Agreement is a check on rows that the target answered greedily; on others it is merely informative.
    """
    apart: list[Tensor] = []
    hits, nll, tokens, as_own = [0, 0, 0], [0.0, 0.0, 0.0], 0, 0
    for row in rows:
        ids, stored = row.input_ids[:max_tokens].long().to(target.device), row.states[:max_tokens, -1].to(target.device)
        own = target.packed(ids, [len(ids)]).last
        normed = F.rms_norm(own, (own.shape[-1],), target.norm, target.config.eps)
        apart.append(torch.stack([_relative(stored, own), _relative(stored, normed)], -1))
        asked = row.loss_mask[1:max_tokens].bool().nonzero()[:, 0].to(target.device)
        label, read = ids[1:][asked], stored[asked].to(target.dtype)
        readings = target.logits(read), target.head(read).float(), target.logits(own[asked])
        for i, logits in enumerate(readings):
            hits[i] += int((logits.argmax(-1) == label).sum())
            nll[i] += float(F.cross_entropy(logits, label, reduction="sum"))
        as_own += int((readings[0].argmax(-1) == readings[2].argmax(-1)).sum())
        tokens += len(asked)
    before, after = torch.cat(apart).median(0).values.tolist()
    count = max(tokens, 1)
    return NormProbe(
        reading="before_final_norm" if before <= after else "after_final_norm",
        before_distance=before,
        after_distance=after,
        before_agreement=hits[0] / count,
        after_agreement=hits[1] / count,
        own_agreement=as_own / count,
        before_nll=nll[0] / count,
        after_nll=nll[1] / count,
        target_nll=nll[2] / count,
        rows=len(rows),
        tokens=tokens,
    )


def _relative(stored_LH: Tensor, state_LH: Tensor) -> Tensor:
    """Relative L2 [L-1] of positions after the first; infinite where the stored state is not finite."""
    stored, state = stored_LH[_FIRST:].float(), state_LH[_FIRST:].float()
    apart = (stored - state).norm(dim=-1) / state.norm(dim=-1).clamp_min(1e-30)
    return apart.nan_to_num(torch.inf, torch.inf)


def row_faults(folder: str, rows: Iterable[ProbeRow], prepared: dict[str, tuple[Tensor, Tensor]]) -> list[RowFaults]:
    """Look at every stored row of a folder; `prepared` gives ids and mask [L] by row_id. See RowFaults."""
    records = []
    for row in rows:
        ids, mask = prepared.get(row.row_id, (row.input_ids[:0], row.loss_mask[:0]))
        tail = row.states[_FIRST:]
        constant = (tail == tail[:1]).all(-1).all(0).sum() if len(tail) > 1 else 0
        records.append(
            RowFaults(
                row_id=row.row_id,
                folder=folder,
                tokens=len(row.input_ids),
                dtype=str(row.states.dtype).removeprefix("torch."),
                nan=int(row.states.isnan().sum()),
                inf=int(row.states.isinf().sum()),
                zero_states=int((row.states == 0).all(-1).sum()),
                constant_slots=int(constant),
                ids_equal=_equal(row.input_ids, ids),
                mask_equal=_equal(row.loss_mask, mask),
            )
        )
    return records


def _equal(stored: Tensor, wanted: Tensor) -> bool:
    return stored.shape == wanted.shape and bool((stored.long() == wanted.long()).all())
