"""The judge: stable words, no hole in a result, nothing of Great Expectations' own in the report."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from stages.contracts.errors import DataError
from stages.gates import _judge
from stages.gates._judge import Judge, Table, among, at_most, between, same, unique

ROWS = pd.DataFrame({"name": ["a", "b", "c"], "x": np.array([1, 2, 5]), "y": [1.0, 2.0, 3.0]})


def table(*expectations: _judge.Expectation) -> Table:
    return Table("things", ROWS, "name", expectations)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def words(says: str) -> dict[str, str]:
    return {"says": says, "why": "because", "do": "this"}


def test_reports_are_byte_identical_and_hold_plain_values() -> None:
    asked = table(
        between("x", high=3, **words("small")), unique("x", **words("once")), at_most("x", "y", **words("below"))
    )
    reports = [_judge.judge("extraction", "things", "sha256:0", [asked]) for _ in range(2)]
    assert reports[0].canonical() == reports[1].canonical()
    assert b"numpy" not in reports[0].canonical() and b"batch" not in reports[0].canonical()
    assert not reports[0].success


def test_checks_come_in_the_order_asked_with_rows_and_nulls_first(judge: Judge) -> None:
    checks = judge.checks(table(same("x", "y", **words("equal")), among("name", ["a", "b", "c"], **words("known"))))
    assert [c.assertion for c in checks] == [
        "there is at least one row",
        "name is never empty",
        "x is never empty",
        "y is never empty",
        "equal",
        "known",
    ]
    assert [c.failing for c in checks if not c.success] == [("c: 5 against 3",)]


def test_a_check_missing_from_the_result_is_an_error(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Judge._validate

    def with_a_hole(self: Judge, *args: object) -> dict[int, dict[str, object]]:
        found = whole(self, *args)  # type: ignore[arg-type]
        del found[max(found)]
        return found

    monkeypatch.setattr(Judge, "_validate", with_a_hole)
    with pytest.raises(DataError, match=r"left checks out of its result(.|\n)*small"):
        judge.checks(table(between("x", high=3, **words("small"))))


def test_a_check_that_cannot_be_computed_is_an_error_not_a_refusal(judge: Judge) -> None:
    with pytest.raises(DataError, match=r"could not be computed(.|\n)*absent"):
        judge.checks(table(between("absent", high=3, **words("small"))))


def test_only_ten_failing_rows_are_named_and_all_are_counted(judge: Judge) -> None:
    many = Table(
        "things",
        pd.DataFrame({"name": [f"n{i:02}" for i in range(40)], "x": range(40)}),
        "name",
        (between("x", high=4, **words("small")),),
    )
    check = judge.checks(many)[-1]
    assert check.actual == "35 of 40 rows" and len(check.failing) == 10 and check.failing[0] == "n05: 5"
