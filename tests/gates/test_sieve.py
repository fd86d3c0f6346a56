"""The telling rows are judged in place of all: the same verdicts in the same words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from stages.gates import extraction
from stages.gates._extraction_facts import row_facts
from stages.gates._extraction_rows import row_expectations
from stages.gates._judge import Judge
from tests.gates import faults, passing

PARAMS = passing.params()
GOOD = passing.extraction_evidence()
CHANGES = {f.name: f for f in faults.EXTRACTION if f.table == "rows"}


class InPieces:
    """Rows as frames of seven."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def read(self, columns: Sequence[str] | None = None) -> Iterator[pd.DataFrame]:
        for start in range(0, len(self._rows), 7):
            piece = self._rows.iloc[start : start + 7].reset_index(drop=True)
            yield piece if columns is None else piece[list(columns)]


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def test_of_good_rows_a_few_stand_for_all() -> None:
    facts = row_facts(replace(GOOD, rows=InPieces(GOOD.rows)), row_expectations(GOOD, PARAMS))
    assert facts.rows == 40 and 1 <= len(facts.table) <= 12
    assert facts.held_out_rows == 8 and facts.of_source["coding"]["rows"] == 20


@pytest.mark.parametrize("name", ["none", *CHANGES])
def test_what_is_left_is_judged_as_the_whole_is(judge: Judge, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = GOOD if name == "none" else CHANGES[name].change(GOOD)
    pieces = _rows_checks(judge, replace(evidence, rows=InPieces(evidence.rows)))
    monkeypatch.setattr(
        "stages.gates._extraction_facts.telling", lambda rows, _: pd.Series([True] * len(rows)).to_numpy()
    )
    assert pieces == _rows_checks(judge, evidence)


def _rows_checks(judge: Judge, evidence: extraction.Evidence) -> list[tuple[str, bool, str, tuple[str, ...]]]:
    table = next(t for t in extraction.tables(evidence, PARAMS) if t.name == "rows")
    return [(c.assertion, c.success, c.actual, c.failing) for c in judge.checks(table)]
