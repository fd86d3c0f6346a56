"""Capture points: the one way this project names a place on a target's residual stream.

Point k is the residual stream after k decoder layers: 0 is the embedding output, n (the number of layers) is the output
of the last layer before the final norm. Every engine numbers the same places differently (stages/capture/dialects.py);
all have the same width, so no shape check can tell one from another. The state after the final norm is no point at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stages.contracts.errors import ParamsError

_LEAST_LAYERS = 4  # three distinct points between embedding and last


def default_points(layers: int) -> tuple[int, int, int]:
    """EAGLE-3's usual low, middle and high point, in EAGLE's own trainer: 2, n//2, n-3."""
    return (2, layers // 2, layers - 3)


def even_points(layers: int) -> tuple[int, int, int]:
    """First, middle and last place that can be captured: three distinct points from 4 layers on, where EAGLE's meet."""
    return (1, layers // 2, layers - 1)


def _proposal(layers: int) -> str:
    if layers < _LEAST_LAYERS:
        return f"a target of {layers} layers is too shallow for three distinct points: {_LEAST_LAYERS} are the least"
    low, middle, high = default_points(layers)
    if low < middle < high < layers:
        return f"for this target {[low, middle, high]} is usual"
    return f"for this target take {list(even_points(layers))}, spaced evenly: EAGLE's usual ones meet in so few layers"


@dataclass(frozen=True)
class CapturePoints:
    """Places where auxiliary states are taken, and the depth of the target that they belong to.

    Args:
        points: decoder layers applied, ascending and distinct.
        layers: decoder layers n of the target.
        embedding: whether point 0 is asked for; it is refused otherwise, for a draft fed it knows no layer's work.
        last: whether point n, before the final norm, is asked for; most engines cannot capture it.
        where: what an error names as the place of the fault.

    Raises:
        ParamsError: not ascending, doubled, negative, beyond n, 0 or n without being asked for, or a target too shallow.
    """

    points: tuple[int, ...]
    layers: int
    embedding: bool = False
    last: bool = False
    where: str = field(default="params.yaml: capture.points", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not (faults := self._faults()):
            return
        low, high = 0 if self.embedding else 1, self.layers if self.last else self.layers - 1
        raise ParamsError(
            "These capture points cannot be used",
            where=self.where,
            expected=f"ascending, distinct points between {low} and {high} (number of decoder layers applied)",
            got=f"{list(self.points)}: " + "; ".join(faults),
            do=_proposal(self.layers),
        )

    def _faults(self) -> list[str]:
        points, n = self.points, self.layers
        faults: list[str] = []
        if list(points) != sorted(points):
            faults.append("not ascending; engines concatenate captures in ascending order whatever the list says")
        if len(set(points)) != len(points):
            faults.append("doubled; engines drop doubles in silence and the width no longer fits")
        if 0 in points and not self.embedding:
            faults.append("0 is the embedding output, before any layer")
        if any(p < 0 for p in points):
            faults.append("negative; count layers from the embedding (0)")
        if n in points and not self.last:
            faults.append(f"{n} is the last point of this target and no engine can capture it as an auxiliary state")
        if any(p > n for p in points):
            faults.append(f"beyond {n}, the last point of this target")
        if n < _LEAST_LAYERS and not (self.embedding or self.last) and not faults:
            faults.append(f"{n} layers leave no room for a low, a middle and a high point")
        return faults

    @classmethod
    def usual(cls, layers: int) -> CapturePoints:
        """EAGLE-3's usual points of a target, or evenly spaced ones where those meet.

        Raises:
            ParamsError: fewer than four layers.
        """
        low, middle, high = default_points(layers)
        return cls((low, middle, high) if low < middle < high < layers else even_points(layers), layers)

    @property
    def slots(self) -> tuple[int, ...]:
        """The points of a stored row's slots: these, then the last state."""
        return (*self.points, self.layers)

    def width(self, hidden_size: int) -> int:
        """Values a token that a draft is fed: the states concatenated."""
        return len(self.points) * hidden_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)


def check_points(points: tuple[int, ...], layers: int, where: str = "params.yaml: capture.points") -> tuple[int, ...]:
    """Return `points` when they can be captured as auxiliary states of a target with `layers` decoder layers.

    Raises:
        ParamsError: not ascending, doubled, the embedding (0), or at or beyond the last point n, which engines cannot
            capture as an auxiliary state.
    """
    return CapturePoints(points, layers, where=where).points


def name_points(fed: tuple[int, ...], claimed: tuple[int, ...], layers: int) -> str:
    """Put in words how the points found relate to the points claimed: a uniform shift, a swap, the embedding, the last."""
    if fed == claimed:
        return "as claimed"
    faults: list[str] = []
    shifts = {f - c for f, c in zip(fed, claimed, strict=True)}
    if len(shifts) == 1:
        shift = shifts.pop()
        faults.append(f"every slot is shifted by {shift:+d} layer{'s' if abs(shift) > 1 else ''}")
    elif sorted(fed) == sorted(claimed):
        faults.append("the slots are swapped")
    elif 0 in fed and fed == (0, *claimed[:-1]):
        faults.append("the embedding was put first and the last point dropped, every other slot moved by one place")
    if 0 in fed:
        faults.append("a slot holds the embedding (point 0)")
    if layers in fed:
        faults.append(f"a slot holds the last point ({layers})")
    return "; ".join(faults) or f"slots hold {list(fed)}"
