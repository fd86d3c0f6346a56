"""One stored row against the target run again, named in words: which points, which shift, which norm, whose row.

L tokens of a row, S slots, H hidden size, N = n+2 columns: points 0..n, then the last state after the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.capture.findings import Finding, LastState, RowLike, dtype_name, few, slots_of
from stages.capture.margins import REFUSED, Margin, coarser, margin_of
from stages.capture.probe import FIRST, distances, high
from stages.contracts.points import name_points

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

AGAIN = "extract this row again"
_IDS = "compare the layer ids that the engine was given with stages/capture/dialects.py, then extract again"
_LEAST_SHARE = 0.05  # of a row's positions; fewer that fit are chance


@dataclass(frozen=True, eq=False)
class RowProbe:
    """A row's distances.

    Attributes:
        far: relative L2 [L-1, S, N].
        medians: [S, N], over positions.
        claimed: the column that each slot is said to hold; -1: nothing is said.
        has_last: whether the last slot is the last state.
        margin: what precision explains.
    """

    row: RowLike
    far: Tensor
    medians: Tensor
    claimed: tuple[int, ...]
    has_last: bool
    margin: Margin

    @property
    def layers(self) -> int:
        return self.far.shape[-1] - 2

    @property
    def nearest(self) -> tuple[int, ...]:
        """The column that each slot is nearest to; n+1 is the state after the final norm, which is no point."""
        return tuple(self.medians.argmin(-1).tolist())

    @property
    def near(self) -> bool:
        """Whether every slot is some state of this row."""
        return bool((self.medians.min(-1).values < REFUSED).all())

    @property
    def aux(self) -> tuple[int, ...]:
        return self.nearest[:-1] if self.has_last else self.nearest

    def distance(self, slot: int) -> float:
        """Median distance to what the slot is said to hold, or else to what it is nearest to."""
        column = self.claimed[slot] if self.claimed[slot] >= 0 else self.nearest[slot]
        return float(self.medians[slot, column])

    @property
    def next_best(self) -> float:
        """The smallest distance of any slot to a point that it does not hold."""
        others = self.medians.clone()
        others[torch.arange(len(self.nearest)), torch.tensor(self.nearest)] = torch.inf
        return float(others[:, :-1].min())


def probe_row(
    target: Decoder,
    row: RowLike,
    points: Sequence[int] | None,
    last_state: LastState,
    computed: str | None,
    max_tokens: int,
) -> RowProbe | None:
    """Run the target over the row; None when the row is too short, its states are not one a token, or of another width."""
    slots, tokens, width = slots_of(row), len(row.input_ids), target.config.hidden_size
    if tokens < 2 or not slots or any(slot.shape != (tokens, width) for slot in slots):
        return None
    if points is not None and len(points) != len(row.aux):
        return None  # said of the whole set
    states = torch.stack([slot[:max_tokens].float() for slot in slots], 1)
    far = distances(target, row.input_ids[:max_tokens], states)
    n = target.config.layers
    last = {"before_final_norm": n, "after_final_norm": n + 1, "unknown": -1}[last_state]
    aux = tuple(points) if points is not None else (-1,) * len(row.aux)
    ours = str(target.dtype).removeprefix("torch.")
    margin = margin_of(dtype_name(slots[0]), coarser(ours, computed or dtype_name(slots[0])))
    claimed = aux if row.last is None else (*aux, last)
    return RowProbe(row, far, far.median(0).values, claimed, row.last is not None, margin)


def layer_findings(probe: RowProbe) -> Iterator[Finding]:
    """What a row shows whose slots are states of its own tokens: the wrong ones, or the right ones but not quite."""
    n, aux = probe.layers, probe.aux
    claimed = probe.claimed[: len(aux)]
    normed = [slot for slot, column in enumerate(aux) if column == n + 1]
    if normed:
        what = "An auxiliary slot holds the last state after the final norm, which is no point of the stream"
        found = f"slot {few(normed)}, at distance {_least(probe, normed[0])}"
        yield _finding(probe, "post_norm_slot", what, "points below the last", found, _IDS)
    elif claimed and claimed[0] >= 0 and aux != claimed:
        what, expected = "Slots hold other points of the target than is said", f"points {list(claimed)}"
        found = f"points {list(aux)}: {name_points(aux, claimed, n)}; distances {_all_least(probe)}"
        detail = {"points": list(aux)}
        yield _finding(probe, "layers", what, expected, found, _IDS, **detail)
    if probe.has_last and probe.nearest[-1] < n:
        point = probe.nearest[-1]
        what, expected = "The last slot does not hold the last state", f"point {n} of {n}"
        found = f"point {point}, at distance {_least(probe, len(aux))}; a list without the last layer makes its reader take the last of the others"
        yield _finding(probe, "last_slot", what, expected, found, _IDS, point=point)
    if not normed and all(c in (-1, near) for c, near in zip(probe.claimed, probe.nearest, strict=True)):
        yield from _precision(probe)


def _precision(probe: RowProbe) -> Iterator[Finding]:
    """The right points, but farther than storing and computing explain."""
    for slot, column in enumerate(probe.nearest):
        per_position = probe.far[:, slot, column]
        median, p99 = float(per_position.median()), high(per_position)
        if median > probe.margin.median or p99 > probe.margin.p99:
            what = "States agree less with the target run again than precision explains"
            expected = f"median {probe.margin.median:g} and 99 of 100 positions {probe.margin.p99:g} at most"
            found = f"slot {slot}: median {median:.4f}, 99 of 100 positions {p99:.4f}; nearest is the right point"
            do = "compare weights, revision and quantisation of the target that was captured with those of this one"
            yield _finding(probe, "imprecise", what, expected, found, do, median=median, p99=p99)
            return
    closest = max(probe.distance(slot) for slot in range(len(probe.nearest)))
    if probe.next_best < 2 * closest:
        what = "Two points of the target are as near as each other, so that the nearest says little"
        found = f"{closest:.4f} to the nearest, {probe.next_best:.4f} to another"
        yield _finding(probe, "no_margin", what, "another point at least twice as far", found, "probe longer rows")


def torn_tokens(probe: RowProbe) -> list[int]:
    """Tokens whose states are far from what the others hold; none when all are near, or when next to none is.

    Where most positions are near something, that is what they hold; else it is what they are said to hold.
    """
    columns = probe.nearest if probe.near else probe.claimed
    if any(column < 0 for column in columns):
        return []
    chosen = torch.stack([probe.far[:, slot, column] for slot, column in enumerate(columns)], -1)
    strays = (chosen >= REFUSED).any(-1)
    whole = all(high(chosen[:, slot]) < REFUSED for slot in range(len(columns)))
    if whole or float(strays.float().mean()) > 1 - _LEAST_SHARE:
        return []
    return (strays.nonzero()[:, 0] + FIRST).tolist()


def torn_finding(probe: RowProbe, tokens: list[int]) -> Finding:
    """A row of which `tokens` hold states that are not theirs."""
    what = "Part of a row holds states that are not this row's"
    found = f"tokens {spans(tokens)} of {len(probe.far) + FIRST} are near no state of theirs"
    expected = "each token's own states; a prefill cut in pieces or reordered leaves another request's at some of them"
    return _finding(probe, "torn", what, expected, found, AGAIN, tokens=tokens)


def spans(tokens: list[int]) -> str:
    """`3 to 7, 9` for 3, 4, 5, 6, 7, 9."""
    runs: list[list[int]] = []
    for token in tokens:
        if runs and token == runs[-1][1] + 1:
            runs[-1][1] = token
        else:
            runs.append([token, token])
    shown = ", ".join(f"{a} to {b}" if b > a else str(a) for a, b in runs[:4])
    return shown + (", …" if len(runs) > 4 else "")


def _least(probe: RowProbe, slot: int) -> str:
    return f"{float(probe.medians[slot].min()):.4f}"


def _all_least(probe: RowProbe) -> str:
    return ", ".join(_least(probe, slot) for slot in range(len(probe.aux)))


def _finding(probe: RowProbe, kind: str, what: str, expected: str, found: str, do: str, **detail: object) -> Finding:
    return Finding(kind, probe.row.file, probe.row.index, what, expected, found, do, detail=detail)
