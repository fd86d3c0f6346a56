"""Of a table too long to hold, the rows that a judgement can turn on: those that could fail a check, and the extremes that a
check names when all is well. Great Expectations judges what is left; what was left out passes every check by plain
comparison, and is counted in Table.count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stages.gates._judge import Expectation

if TYPE_CHECKING:
    from pandas import DataFrame

Mask = npt.NDArray[np.bool_]


def telling(rows: DataFrame, expectations: Sequence[Expectation]) -> Mask:
    """Which rows to keep, bool [rows]. Whether a value is there twice is not seen here: `unique` passes all."""
    keep = np.zeros(len(rows), bool)
    keep[:1] = True
    for e in expectations:
        for column in e.columns:
            keep |= np.asarray(rows[column].isna(), bool)
        keep |= _could_fail(rows, e)
        if e.gx == "ExpectColumnValuesToBeBetween" and len(rows):
            judged = rows[e.columns[0]].to_numpy()
            keep[[int(np.argmin(judged)), int(np.argmax(judged))]] = True
    return keep


def _could_fail(rows: DataFrame, e: Expectation) -> Mask:
    judged: Any = rows[e.columns[0]]
    passes: Any
    match e.gx:
        case "ExpectColumnValuesToBeBetween":
            low, high = e.arguments["min_value"], e.arguments["max_value"]
            passes = judged.notna()
            passes &= True if low is None else judged >= low
            passes &= True if high is None else judged <= high
        case "ExpectColumnValuesToBeInSet":
            passes = judged.isin(e.arguments["value_set"])
        case "ExpectColumnPairValuesToBeEqual":
            passes = judged == rows[e.columns[1]]
        case "ExpectColumnValuesToBeUnique":
            return np.zeros(len(rows), bool)
        case _:
            return np.ones(len(rows), bool)
    return ~np.asarray(passes, bool)
