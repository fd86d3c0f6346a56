"""Every expectation of every gate is shown to fail, for one fault each and with the words a person needs."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from stages.contracts.report import Check
from stages.gates import deployment, extraction, training
from stages.gates._judge import Judge, Table
from tests.gates import passing
from tests.gates.faults import FAULTS, Fault, fact, field, ratio, unmeasured

GATES: dict[str, tuple[ModuleType, Any]] = {
    "extraction": (extraction, passing.extraction_evidence()),
    "training": (training, passing.training_evidence()),
    "deployment": (deployment, passing.deployment_evidence()),
}
PARAMS = passing.params()
TABLES: dict[str, dict[str, Table]] = {g: {t.name: t for t in m.tables(e, PARAMS)} for g, (m, e) in GATES.items()}
EVERY_FAULT = [(g, f) for g, faults in FAULTS.items() for f in faults]
EVERY_TABLE = [(g, name) for g, tables in TABLES.items() for name in tables]


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def changed(gate: str, evidence: Any) -> list[Table]:
    """Tables that differ from those that pass: the others need no second judgement."""
    before = TABLES[gate]
    return [
        t
        for t in GATES[gate][0].tables(evidence, PARAMS)
        if not t.rows.equals(before[t.name].rows) or t.expectations != before[t.name].expectations
    ]


@pytest.mark.parametrize(("gate", "table"), EVERY_TABLE, ids=lambda v: str(v))
def test_good_evidence_passes_every_check(judge: Judge, gate: str, table: str) -> None:
    assert [c for c in judge.checks(TABLES[gate][table]) if not c.success] == []


@pytest.mark.parametrize(("gate", "fault"), EVERY_FAULT, ids=[f"{g}: {f.name}" for g, f in EVERY_FAULT])
def test_one_fault_fails_its_check_in_words_and_no_other(judge: Judge, gate: str, fault: Fault) -> None:
    tables = changed(gate, fault.change(GATES[gate][1]))
    failed = {c.assertion: c for t in tables for c in judge.checks(t) if not c.success}
    assert set(failed) == {fault.says, *fault.also}
    check = failed[fault.says]
    assert check.table == fault.table
    assert fault.words in words(check)
    assert check.failing and check.why and check.do and check.expected


def words(check: Check) -> str:
    return "\n".join([check.actual, *check.failing, check.do])


@pytest.mark.parametrize("gate", GATES)
def test_every_expectation_has_a_fault(gate: str) -> None:
    asked = {(t.name, e.says) for t in TABLES[gate].values() for e in t.expectations} - UNREACHABLE
    shown = {(f.table, f.says) for f in FAULTS[gate]}
    assert asked - shown == set(), "add a fault to tests/gates/faults.py"
    assert shown - asked == set(), "these faults speak of checks that no longer exist"


# safetensors cannot hold a name twice, so the table cannot be built with one; the check stands for other readers
UNREACHABLE = {("tensors", "no tensor twice")}


@pytest.mark.parametrize(("gate", "table"), EVERY_TABLE, ids=lambda v: str(v))
def test_an_empty_table_fails(judge: Judge, gate: str, table: str) -> None:
    good = TABLES[gate][table]
    failed = [c.assertion for c in judge.checks(replace(good, rows=good.rows.iloc[:0])) if not c.success]
    assert failed == ["there is at least one row"]


@pytest.mark.parametrize(("gate", "table"), EVERY_TABLE, ids=lambda v: str(v))
def test_an_empty_value_fails_in_every_column_that_is_judged(judge: Judge, gate: str, table: str) -> None:
    good = TABLES[gate][table]
    columns = {c for e in good.expectations for c in e.columns} | {good.key}
    hollow = good.rows.copy()
    for column in columns:
        hollow[column] = hollow[column].astype(object)
        hollow.at[0, column] = None
    failed = {
        c.column for c in judge.checks(replace(good, rows=hollow)) if not c.success and "never empty" in c.assertion
    }
    assert failed == columns


def test_without_an_earlier_release_the_check_says_so(judge: Judge) -> None:
    evidence = field(release=None)(GATES["deployment"][1])
    (table,) = changed("deployment", evidence)
    assert set(table.rows["release_words"]) == {"no earlier release"}
    assert all(c.success for c in judge.checks(table))


def test_sampling_switched_off_is_said_and_not_passed_over(judge: Judge) -> None:
    evidence = GATES["deployment"][1]
    (table,) = changed("deployment", replace(evidence, serve=evidence.serve.model_copy(update={"sampling": None})))
    check = judge.checks(table)[-1]
    assert check.success and "switched off in params.yaml" in check.actual


def test_a_domain_that_was_not_served_fails(judge: Judge) -> None:
    evidence = GATES["deployment"][1]
    by_domain = {"coding": evidence.serve.served_by_domain["coding"]}
    (table,) = changed("deployment", fact("serve", served_by_domain=by_domain)(evidence))
    failed = {c.assertion: c for c in judge.checks(table) if not c.success}
    assert failed["accept length is never empty"].failing[0].startswith("general")
    assert "not served" in failed["accept length reaches its threshold"].failing[0]


def test_a_load_without_a_policy_measurement_fails(judge: Judge) -> None:
    (table,) = changed("deployment", unmeasured(GATES["deployment"][1]))
    failed = {c.assertion: c for c in judge.checks(table) if not c.success}
    assert "ratio is never empty" in failed and "concurrency 4" in failed["ratio is never empty"].failing[0]


def test_a_policy_that_noise_makes_look_slow_is_not_refused(judge: Judge) -> None:
    noisy = ratio(1, ratio=0.88, low=0.76, high=1.02)(GATES["deployment"][1])
    table = next(t for t in deployment.tables(noisy, PARAMS) if t.name == "policy")
    assert all(c.success for c in judge.checks(table))


def test_a_capped_answer_fails_when_the_policy_drops_them(judge: Judge) -> None:
    raw = PARAMS.model_dump()
    raw["prepare"]["capped"] = "drop"
    tables = extraction.tables(GATES["extraction"][1], type(PARAMS).model_validate(raw))
    rows = next(t for t in tables if t.name == "rows")
    failed = [c for c in judge.checks(rows) if not c.success]
    assert [c.assertion for c in failed] == ["answers ended in a way that the policy keeps"]
    assert failed[0].actual == "20 of 40 rows" and len(failed[0].failing) == 10


def test_an_empty_set_of_rows_is_refused_not_passed(judge: Judge) -> None:
    evidence = replace(GATES["extraction"][1], rows=pd.DataFrame(columns=passing.prepared_rows().columns))
    tables = {t.name: t for t in extraction.tables(evidence, PARAMS)}
    assert "there is at least one row" in {c.assertion for c in judge.checks(tables["rows"]) if not c.success}
