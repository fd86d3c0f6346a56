"""What a run leaves in Prefect, as a person reads it."""

from __future__ import annotations

from pathlib import Path

from flows import artifacts
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    BenchmarkEvidence,
    ServeEvidence,
    ServingPolicy,
)
from tests.flows.samples import ZERO, gate_report, write_evidence


def test_a_refusal_is_told_with_failing_rows_and_what_to_do() -> None:
    text = artifacts.gate_markdown(gate_report("training", ZERO, success=False))
    assert text.startswith("# gate-training: **refused** (1 of 1 checks)")
    row = text.splitlines()[-1]
    assert row.startswith("| **no** | layer slots.nearest_point |")
    assert "| [3, 16, 28] | [0, 3, 16] | slot 0, slot 1 | capture again" in row


def test_failed_checks_stand_first_and_a_cell_cannot_break_the_table() -> None:
    good = gate_report("training", ZERO).checks[0]
    bad = good.model_copy(
        update={"success": False, "actual": "a|b\nc", "failing": tuple(f"row {i}" for i in range(13))}
    )
    report = gate_report("training", ZERO).model_copy(update={"checks": (good, bad), "success": False})
    first, second = artifacts.gate_markdown(report).splitlines()[-2:]
    assert first.startswith("| **no**") and "a\\|b c" in first and "row 9 and 3 more" in first
    assert second.startswith("| ok")


def test_accept_length_has_a_row_a_domain_served_beside_simulated(tmp_path: Path) -> None:
    write_evidence(tmp_path, ZERO)
    rows = artifacts.accept_rows(ServeEvidence.read(tmp_path / SERVE_EVIDENCE))
    assert [r["domain"] for r in rows] == ["all", "coding", "general"]
    assert rows[0]["served"] == 1.6 and rows[2]["simulated"] == 1.4
    assert rows[0]["by position"] == "0.50 0.20 0.10"


def test_throughput_has_the_ratio_over_plain_and_the_policy_its_levels(tmp_path: Path) -> None:
    write_evidence(tmp_path, ZERO)
    rows = artifacts.throughput_rows(BenchmarkEvidence.read(tmp_path / BENCHMARK_EVIDENCE))
    assert [(r["arm"], r["tokens/s"], r["over plain"]) for r in rows] == [
        ("plain", 51.0, ""),
        ("speculative", 66.0, "1.30 (1.20..1.40)"),
    ]
    text = artifacts.policy_markdown(ServingPolicy.read(tmp_path / POLICY))
    assert "| 1 | 3 | 1.30 (1.20..1.40) |" in text and "plain decoding beyond it" in text
    assert "| 5 | 0 (plain decoding) | not measured |" in text
