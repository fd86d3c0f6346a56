"""Great Expectations, asked about tables that say one row per thing (row, folder, slot, tensor, domain).

It passes an empty table and skips nulls, so both are asked first of every table; a check that its result leaves out is
an error, never a pass. Its import takes seconds, hence inside the function that needs it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.contracts.errors import DataError
from stages.contracts.report import Check, GateName, GateReport

if TYPE_CHECKING:
    from pandas import DataFrame

_NAMED = 10  # failing rows a check lists; the count is in `actual`


@dataclass(frozen=True)
class Expectation:
    """One Great Expectations check in plain words.

    Args:
        says: the assertion as a person reads it; unique within its table.
        gx: class name in great_expectations.expectations.
        arguments: of that class; plain values.
        columns: the columns it looks at, the judged one first.
        expected: what passes.
        why: what goes wrong otherwise.
        do: what to do when it fails.
        tell: a column that says in words what is wrong with a failing row.
    """

    says: str
    gx: str
    arguments: dict[str, Any]
    columns: tuple[str, ...]
    expected: str
    why: str
    do: str
    tell: str = ""


@dataclass(frozen=True)
class Table:
    """Rows to judge; `key` is the column that names a row to a person. `count`: of how many rows these are the telling ones
    (_sieve.py); None when they are all."""

    name: str
    rows: DataFrame
    key: str
    expectations: tuple[Expectation, ...]
    count: int | None = None

    @property
    def total(self) -> int:
        return len(self.rows) if self.count is None else self.count

    def asked(self) -> tuple[Expectation, ...]:
        """The expectations, after the two that Great Expectations does not make by itself."""
        columns = dict.fromkeys([self.key, *(c for e in self.expectations for c in e.columns)])
        return (_some_row(self.name), *(_no_null(c) for c in columns), *self.expectations)


def between(
    column: str, low: float | None = None, high: float | None = None, *, says: str, why: str, do: str, tell: str = ""
) -> Expectation:
    """Every value of `column` within low and high, both included."""
    words = {
        (True, False): f"at least {low}",
        (False, True): f"at most {high}",
        (True, True): f"between {low} and {high}",
    }
    expected = words[(low is not None, high is not None)]
    arguments = {"column": column, "min_value": low, "max_value": high}
    return Expectation(says, "ExpectColumnValuesToBeBetween", arguments, (column,), expected, why, do, tell)


def among(column: str, values: Sequence[Any], *, says: str, why: str, do: str, tell: str = "") -> Expectation:
    """Every value of `column` one of `values`."""
    expected = "one of " + ", ".join(map(str, values)) if len(values) > 1 else str(values[0])
    arguments = {"column": column, "value_set": list(values)}
    return Expectation(says, "ExpectColumnValuesToBeInSet", arguments, (column,), expected, why, do, tell)


def unique(column: str, *, says: str, why: str, do: str) -> Expectation:
    """No value of `column` twice."""
    return Expectation(says, "ExpectColumnValuesToBeUnique", {"column": column}, (column,), "each value once", why, do)


def same(column: str, other: str, *, says: str, why: str, do: str, tell: str = "") -> Expectation:
    """`column` equal to `other`, row by row."""
    arguments = {"column_A": column, "column_B": other}
    expected = f"equal to {other.replace('_', ' ')}"
    return Expectation(says, "ExpectColumnPairValuesToBeEqual", arguments, (column, other), expected, why, do, tell)


def at_most(column: str, other: str, *, says: str, why: str, do: str, tell: str = "") -> Expectation:
    """`column` not above `other`, row by row."""
    arguments = {"column_A": other, "column_B": column, "or_equal": True}
    expected = f"{column.replace('_', ' ')} at most {other.replace('_', ' ')}"
    gx = "ExpectColumnPairValuesAToBeGreaterThanB"
    return Expectation(says, gx, arguments, (column, other), expected, why, do, tell)


def _some_row(table: str) -> Expectation:
    return Expectation(
        says="there is at least one row",
        gx="ExpectTableRowCountToBeBetween",
        arguments={"min_value": 1},
        columns=(),
        expected="1 row or more",
        why=f"nothing can be said of {table} when nothing is there",
        do="run `dvc status`, then `dvc repro` the stage that writes it",
    )


def _no_null(column: str) -> Expectation:
    return Expectation(
        says=f"{column.replace('_', ' ')} is never empty",
        gx="ExpectColumnValuesToNotBeNull",
        arguments={"column": column},
        columns=(column,),
        expected="a value in every row",
        why="an empty value would pass every other check unseen",
        do="run `dvc repro` for the stage that writes it; a value was lost on the way",
    )


class Judge:
    """An ephemeral Great Expectations context, opened once (seconds) and used for any number of tables."""

    def __init__(self) -> None:
        os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
        os.environ.setdefault("DO_NOT_TRACK", "1")
        warnings.filterwarnings("ignore", module=r"great_expectations|marshmallow")
        import great_expectations as gx
        from great_expectations import expectations
        from great_expectations.data_context.types.base import ProgressBarsConfig

        self._suite, self._expectations = gx.ExpectationSuite, expectations
        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        self._source = context.data_sources.add_pandas("gate")
        self._count = 0

    def checks(self, table: Table) -> tuple[Check, ...]:
        """Judge one table; checks come in the order in which they are asked.

        Raises:
            DataError: a check could not be computed or is missing from the result.
        """
        asked = table.asked()
        results = self._validate(table, asked)
        missing = [e.says for i, e in enumerate(asked) if i not in results]
        if missing:
            raise DataError(
                "Great Expectations left checks out of its result",
                where=f"table {table.name}",
                expected=f"{len(asked)} results",
                got="; ".join(missing),
                do="compare great-expectations with constraints.txt; a gate with a hole in it passes nothing",
            )
        return tuple(_check(table, e, results[i]) for i, e in enumerate(asked))

    def _validate(self, table: Table, asked: Sequence[Expectation]) -> dict[int, dict[str, Any]]:
        self._count += 1
        rows = table.rows.reset_index(drop=True)
        suite = self._suite(name=f"{table.name} {self._count}")
        for i, e in enumerate(asked):
            suite.add_expectation(getattr(self._expectations, e.gx)(**e.arguments, meta={"at": i}))
        asset = self._source.add_dataframe_asset(suite.name)
        batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": rows})
        outcome = batch.validate(suite, result_format={"result_format": "COMPLETE"})
        found: dict[int, dict[str, Any]] = {}
        for result in outcome.results:
            _demand_computed(table, result)
            told: Any = result.expectation_config
            found[int(told.meta["at"])] = {
                "success": bool(result.success),
                "rows": [int(i) for i in result.result.get("unexpected_index_list") or ()],
            }
        self._source.delete_asset(suite.name)
        return found


def judge(gate: GateName, subject: str, subject_digest: str, tables: Sequence[Table]) -> GateReport:
    """Judge every table and bind the result to what was judged."""
    judge_ = Judge()
    checks = tuple(check for table in tables for check in judge_.checks(table))
    return GateReport(
        gate=gate, subject=subject, subject_digest=subject_digest, success=all(c.success for c in checks), checks=checks
    )


def summary(report: GateReport) -> str:
    """The report for a terminal: counts, then each failed check in full."""
    failed = [c for c in report.checks if not c.success]
    tables = dict.fromkeys(c.table for c in report.checks)
    lines = [f"gate-{report.gate}: {report.subject} {report.subject_digest[:19]}"]
    for table in tables:
        checks = [c for c in report.checks if c.table == table]
        bad = sum(not c.success for c in checks)
        lines.append(f"  {table:<20} {len(checks):>3} checks, " + (f"{bad} failed" if bad else "all passed"))
    for c in failed:
        parts = (
            ("where", "; ".join(c.failing)),
            ("expected", c.expected),
            ("got", c.actual),
            ("why", c.why),
            ("do", c.do),
        )
        lines += ["", f"  failed: {c.table}: {c.assertion}", *(f"    {n + ':':<10}{v}" for n, v in parts if v)]
    return "\n".join(lines)


def _demand_computed(table: Table, result: Any) -> None:
    """Great Expectations reports its own exceptions as ordinary failures; tell them apart."""
    info: dict[str, Any] = result.exception_info or {}
    faults = [info] if "raised_exception" in info else list(info.values())
    messages = sorted({str(f["exception_message"]) for f in faults if f.get("raised_exception")})
    if messages:
        raise DataError(
            "A check could not be computed",
            where=f"table {table.name}, {result.expectation_config.type}",
            expected=f"columns {sorted(map(str, table.rows.columns))} that it can read",
            got="; ".join(messages)[:400],
            do="mend the table that stages/gates builds",
        )


def _check(table: Table, e: Expectation, result: dict[str, Any]) -> Check:
    at: list[int] = sorted(result["rows"])
    total = table.total
    if result["success"] or total == 1:  # of one row the figure itself is worth more than how many rows fail
        actual = _all_good(table, e)
    elif not at:
        actual = f"{total} rows"
    else:
        actual = f"{len(at)} of {total} {'row' if total == 1 else 'rows'}" + _shared_words(table, e, at)
    return Check(
        table=table.name,
        assertion=e.says,
        column=", ".join(e.columns),
        success=result["success"],
        expected=e.expected,
        actual=actual,
        failing=tuple(_name_row(table, e, i) for i in at[:_NAMED]),
        why=e.why,
        do=e.do,
    )


def _all_good(table: Table, e: Expectation) -> str:
    total = table.total
    if not e.columns:
        return f"{total} row{'s' * (total != 1)}"
    if e.tell and total == 1:
        return _plain(table.rows[e.tell].iloc[0])
    if total == 1:
        return " = ".join(_plain(table.rows[c].iloc[0]) for c in e.columns[:1])
    column = table.rows[e.columns[0]]
    if e.gx == "ExpectColumnValuesToBeBetween":
        return f"{_plain(column.min())} to {_plain(column.max())} over {total} rows"
    return f"all {total} rows"


def _shared_words(table: Table, e: Expectation, at: list[int]) -> str:
    """What all failing rows have to say, once, when they say the same."""
    if not e.tell:
        return ""
    words = {_plain(table.rows[e.tell].iloc[i]) for i in at}
    return f": {words.pop()}" if len(words) == 1 else ""


def _name_row(table: Table, e: Expectation, i: int) -> str:
    row = table.rows.iloc[i]
    name = _plain(row[table.key])
    if e.tell:
        return f"{name}: {_plain(row[e.tell])}"
    values = [_plain(row[c]) for c in e.columns if c != table.key]
    return f"{name}: {' against '.join(values)}" if values else name


def _plain(value: Any) -> str:
    """A numpy or Python scalar as text that does not depend on its type."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or value != value:
        return "empty"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
