"""Capture points: the one way this project names a place on a target's residual stream.

Point k is the residual stream after k decoder layers: 0 is the embedding output, n (the number of layers) is the output
of the last layer before the final norm. Every engine numbers the same places differently (stages/capture/dialects.py);
all have the same width, so no shape check can tell one from another.
"""

from __future__ import annotations

from stages.contracts.errors import ParamsError


def default_points(layers: int) -> tuple[int, int, int]:
    """EAGLE-3's usual low, middle and high point, in EAGLE's own trainer: 2, n//2, n-3."""
    return (2, layers // 2, layers - 3)


def even_points(layers: int) -> tuple[int, int, int]:
    """First, middle and last place that can be captured: three distinct points from 4 layers on, where EAGLE's meet."""
    return (1, layers // 2, layers - 1)


def _proposal(layers: int) -> str:
    if layers < 4:
        return f"a target of {layers} layers is too shallow for three distinct points: 4 are the least"
    low, middle, high = default_points(layers)
    if low < middle < high < layers:
        return f"for this target {[low, middle, high]} is usual"
    return f"for this target take {list(even_points(layers))}, spaced evenly: EAGLE's usual ones meet in so few layers"


def check_points(points: tuple[int, ...], layers: int, where: str = "params.yaml: capture.points") -> tuple[int, ...]:
    """Return `points` when they can be captured as auxiliary states of a target with `layers` decoder layers.

    Raises:
        ParamsError: not ascending, doubled, the embedding (0), or at or beyond the last point n, which engines cannot
            capture as an auxiliary state.
    """
    faults: list[str] = []
    if list(points) != sorted(points):
        faults.append("not ascending; engines concatenate captures in ascending order whatever the list says")
    if len(set(points)) != len(points):
        faults.append("doubled; engines drop doubles in silence and the width no longer fits")
    if 0 in points:
        faults.append("0 is the embedding output, before any layer")
    if any(p < 0 for p in points):
        faults.append("negative; count layers from the embedding (0)")
    if any(p >= layers for p in points):
        faults.append(f"{layers} is the last point of this target and no engine can capture it as an auxiliary state")
    if faults:
        raise ParamsError(
            "These capture points cannot be used",
            where=where,
            expected=f"ascending, distinct points between 1 and {layers - 1} (number of decoder layers applied)",
            got=f"{list(points)}: " + "; ".join(faults),
            do=_proposal(layers),
        )
    return points


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
