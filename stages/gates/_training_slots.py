"""gate-training's table slots: stored values against the target run again.

Width and dtype are the same at every layer, so shape proves nothing about *which* layer a slot holds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from stages.contracts.params import Params
from stages.contracts.points import name_points
from stages.gates._judge import Expectation, Table, at_most, between, same
from stages.gates._training_evidence import Evidence, capture_anew

if TYPE_CHECKING:
    from pandas import DataFrame

_FAR = 1e6  # a margin over a distance of zero; any number above every threshold


def slots(evidence: Evidence, params: Params) -> Table:
    rows, layers = evidence.slots.copy(), params.target.layers
    together = {str(name): _together(part, layers) for name, part in rows.groupby("folder", sort=False)}
    asked = [*params.capture.points, layers]
    rows["claimed_by_params"] = [asked[i] if i < len(asked) else -1 for i in rows.groupby("folder").cumcount()]
    rows["margin"] = [_margin(n, c) for n, c in zip(rows["next_best_distance"], rows["claimed_distance"], strict=True)]
    words: list[str] = []
    for row in rows.to_dict("records"):
        near = f"claims point {row['claimed_point']}, nearest is point {row['nearest_point']}"
        near = near if row["claimed_point"] == layers else f"{near} ({together[row['folder']]})"
        words.append(f"{near}; {row['cause']}" if row["cause"] else near)
    rows["words"] = words
    rows["p99_words"] = [
        f"99 of 100 positions keep to {p:.4f} of the target, precision explains {limit:g}"
        + (f"; {cause}" if cause else "")
        for p, limit, cause in zip(rows["claimed_p99_distance"], rows["p99_limit"], rows["cause"], strict=True)
    ]
    checks = _slot_expectations(evidence, params)
    if evidence.unprobed:  # said whether the check passes or not
        total = len(evidence.manifest.folders)
        told = f"; {evidence.unprobed} of {total} folders, chosen by a hash, went unprobed"
        checks = tuple(replace(c, expected=c.expected + told) if c.tell else c for c in checks)
    return Table("slots", rows, "slot", checks)


def _together(slots: DataFrame, layers: int) -> str:
    """How the points that a folder's auxiliary slots hold relate to those claimed."""
    aux = slots[slots["claimed_point"] < layers]
    found, claimed = (tuple(int(p) for p in aux[c]) for c in ("nearest_point", "claimed_point"))
    return name_points(found, claimed, layers)


def _margin(next_best: float, claimed: float) -> float:
    """How many times nearer the claimed point is than any other; none for a state that is not finite."""
    if math.isinf(claimed):
        return 0.0
    return min(next_best / claimed, _FAR) if claimed > 0 else _FAR


def _slot_expectations(evidence: Evidence, params: Params) -> tuple[Expectation, ...]:
    gate, fresh = params.gates.training, capture_anew(evidence.manifest.capture)
    again = "compare capture.points with the ids that the capturing engine was given, then " + fresh
    return (
        same(
            "claimed_point",
            "claimed_by_params",
            says="the points claimed are capture.points and the last state",
            why="points that were changed after capture are not the points that were captured",
            do=again,
        ),
        same(
            "nearest_point",
            "claimed_point",
            says="of all the target's points, the nearest is the claimed one",
            why="a draft fed another layer than it was trained on keeps its shape and loses its acceptance",
            do=again,
            tell="words",
        ),
        between(
            "claimed_distance",
            high=gate.max_state_distance,
            says="states agree with the target run again at the claimed point",
            why="bfloat16 storage alone measures 0.0016; more is other weights, another precision or another row",
            do="check that the target and its dtype are those of the capture, then " + again,
        ),
        at_most(
            "claimed_p99_distance",
            "p99_limit",
            says="no part of a row lies farther from the target run again than precision explains",
            why="a prefill that was cut or reordered leaves other states at some positions, which a median does not see",
            do=again,
            tell="p99_words",
        ),
        between(
            "margin",
            gate.min_margin,
            says="the claimed point is nearer than every other by a margin",
            why="without a margin, nearest is chance",
            do=again,
        ),
    )
