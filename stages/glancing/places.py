"""Layer ids as written, the points they mean, and the doubt that is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.contracts.errors import EngineError
from stages.contracts.points import default_points
from stages.glancing.told import Told

PointsOf = Callable[[Sequence[int] | None, str, str, int], tuple[int, ...]]
"""capture.dialects.points_of: ids, dialect, model type, layers -> points."""
Readings = Callable[[Sequence[int], int | None], list[tuple[str, tuple[int, ...]]]]
"""What else the ids can mean: (in whose words, points)."""


@dataclass(frozen=True)
class Depth:
    """A target's number of layers, and who says so. model_type: "" where nothing says."""

    layers: int
    why: str
    model_type: str = ""


@dataclass(frozen=True)
class Slots:
    """States that one row has. aux: auxiliary ones; last: whether the last state is there; states: what the file holds."""

    aux: int
    last: bool


def infer_depth(ids: Sequence[int] | None, numbering: str | None) -> Depth | None:
    """Layers as four written ids tell them: tools that store the last state write its layer as the last id."""
    if not ids or len(ids) < 4 or list(ids) != sorted(set(ids)):
        return None
    if numbering == "speculators_legacy":
        return Depth(ids[-1] + 1, f"its last id {ids[-1]} is the last layer, counted from 0")
    if numbering == "speculators":
        return Depth(ids[-1], f"its last id {ids[-1]} is the last point")
    return None


def tell_points(
    told: Told,
    ids: Sequence[int] | None,
    numbering: str | None,
    depth: Depth | None,
    slots: Slots | None,
    points_of: PointsOf,
    readings: Readings,
    tool: str,
) -> None:
    """Put ids, points and their doubts into `told`. tool: its name, for people."""
    told.facts["layer_ids"] = list(ids) if ids is not None else None
    told.facts["written_in"] = numbering
    if depth is None:
        depth = infer_depth(ids, numbering)
    if depth:
        told.facts["layers"], told.facts["layers_known_from"] = depth.layers, depth.why
    if numbering is None:
        told.add(
            "risk",
            f"This tool records no layer ids and has no default of its own: the {_slots(slots)} may be of any layers",
            _NAME_THEM,
        )
        return
    if ids is None:
        _default(told, tool, numbering, depth, points_of)
        return
    try:
        points = points_of(
            ids, numbering, depth.model_type if depth else "", depth.layers if depth else max(ids, default=0) + 2
        )
    except EngineError as error:
        told.add(
            "fault",
            f"Ids {list(ids)} name no points of this target: {error.got}; expected {error.expected}",
            _NAME_THEM,
        )
        return
    _split(told, points, ids, slots, depth)
    others = [(name, p) for name, p in readings(ids, depth.layers if depth else None) if p != points]
    if others:
        told.facts["other_readings"] = [{"if_written_by": name, "points": list(p)} for name, p in others]


_NAME_THEM = "the value probe names them: `--deep` with the target at hand"


def _slots(slots: Slots | None) -> str:
    return f"{slots.aux} auxiliary states" if slots else "states"


def _default(told: Told, tool: str, numbering: str, depth: Depth | None, points_of: PointsOf) -> None:
    """No ids are written: what the tool's default would be, if nobody chose others."""
    words = f"No layer ids are written. The default of {tool} would be"
    if depth is None:
        told.facts["points_if_default"] = None
        told.add(
            "risk",
            f"{words} the points {_by_depth(numbering, points_of)} of the target's n layers; nothing here tells n",
            _NAME_THEM,
        )
        return
    points = points_of(None, numbering, depth.model_type, depth.layers)
    told.facts["points_if_default"] = list(points)
    told.add(
        "risk",
        f"{words} the points {_list(points)} of {depth.layers} layers; whether it was used is not recorded",
        _NAME_THEM,
    )


def _by_depth(numbering: str, points_of: PointsOf) -> str:
    """A tool's default by the target's layers n: `2, n//2, n-3`, or all one more."""
    n = 61
    terms = {0: "", **{k: f"{k:+d}" for k in range(-9, 10) if k}}
    said: list[str] = []
    for point in points_of(None, numbering, "", n):
        known = {point - n: f"n{terms.get(point - n)}", point - n // 2: f"n//2{terms.get(point - n // 2)}"}
        near = min((k for k in known if abs(k) < 10), key=abs, default=None)
        said.append(str(point) if near is None else known[near])
    return ", ".join(said)


def _split(told: Told, points: tuple[int, ...], ids: Sequence[int], slots: Slots | None, depth: Depth | None) -> None:
    """Auxiliary points and the last one, and what is wrong with them."""
    aux, last = list(points), None
    if len(aux) >= 4 and (slots is None or slots.last):
        last = aux.pop()
    told.facts["points"], told.facts["last_point"] = aux, last
    if len(points) != len(ids):
        told.add(
            "fault",
            f"Ids {list(ids)} are doubled: {len(points)} captures for {len(ids)} ids, and the width no longer fits",
        )
    if list(ids) != sorted(ids):
        told.add(
            "risk",
            f"Ids {list(ids)} do not ascend; captures are concatenated in ascending order whatever the list says",
        )
    if 0 in aux:
        told.add(
            "fault",
            "An auxiliary state is the embedding output (point 0), before any layer",
            "extract with points of layers",
        )
    if depth and depth.layers in aux:
        told.add(
            "fault",
            f"An auxiliary state is the last point ({depth.layers}); no engine can feed it to a draft",
            "extract with lower points",
        )
    if last is not None and depth and last != depth.layers:
        told.add(
            "fault",
            f"The last state is after layer {last} of {depth.layers}: it is not the last layer's output",
            "extract again with the last layer's id",
        )
    if slots and len(points) != slots.aux + slots.last:
        told.add(
            "fault", f"{len(points)} layer ids are written and a row holds {slots.aux + slots.last} states", _NAME_THEM
        )
    if depth and aux and 0 not in aux:
        usual = default_points(depth.layers)
        shifts = {a - b for a, b in zip(aux, usual, strict=False)} if len(aux) == len(usual) else set[int]()
        if len(shifts) == 1 and (shift := shifts.pop()):
            told.add(
                "note",
                f"Each point is {shift:+d} from EAGLE's usual {_list(usual)}: an engine has to be given these points, not its default",
            )


def _list(points: Sequence[int]) -> str:
    return ", ".join(map(str, points))
