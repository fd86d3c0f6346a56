"""What a promotion demands beyond its gate, and the card it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import release
from flows.model_card import feeding
from stages.contracts.beside import BESIDE, AcceptDifference, BesideProduction, ThroughputRatio
from stages.contracts.draft import DraftRecord
from stages.contracts.errors import Refusal
from stages.contracts.evidence import BENCHMARK_EVIDENCE, BenchmarkEvidence
from stages.contracts.params import load_registry
from stages.contracts.report import GateReport, evidence_digests, report_path
from tests.flows.samples import gate_report, write_draft, write_registry


def _demanding(root: Path, how: str) -> None:
    path = root / "params.yaml"
    path.write_text(path.read_text().replace("if_measured", how))


def _beside(root: Path, draft: DraftRecord, production: str, low: float, high: float, ratio_high: float = 1.1) -> None:
    overall = AcceptDifference(requests=40, new=1.6, production=1.65, low=low, high=high)
    BesideProduction(
        draft_digest=draft.digest(),
        production_draft_digest=production,
        engine="in_process",
        engine_version="1",
        device="cpu",
        accept_length={"overall": overall},
        throughput=(ThroughputRatio(concurrency=4, ratio=0.95, low=0.9, high=ratio_high),),
    ).write(root / BESIDE)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, str, DraftRecord]:
    """A clone with a release in production, and another draft that passed; gives production's draft too."""
    write_draft(tmp_path, b"a")
    production = release.promote(tmp_path).record.draft_digest
    return tmp_path, production, write_draft(tmp_path, b"b")


def test_a_draft_not_measured_beside_production_is_refused_only_where_that_is_required(
    pair: tuple[Path, str, DraftRecord],
) -> None:
    root, _, _ = pair
    _demanding(root, "require")
    with pytest.raises(Refusal, match=r"production was not measured beside this one\n.*reports/beside_production.json"):
        release.promote(root)
    write_registry(root, keep_releases=3)
    (root / "params.yaml").write_text((root / "params.yaml").read_text().replace("require", "if_measured"))
    release.promote(root)
    assert release.ledger(root)[-1]["words"] == (
        "not measured beside production; gate-deployment compared with its remembered accept length"
    )
    assert load_registry(root / "params.yaml").keep_releases == 3


@pytest.mark.parametrize("how", ["require", "if_measured"])
def test_a_step_back_beyond_the_interval_is_refused_and_a_noisy_one_is_not(
    pair: tuple[Path, str, DraftRecord], how: str
) -> None:
    root, production, draft = pair
    _demanding(root, how)
    _beside(root, draft, production, -0.09, -0.01)
    with pytest.raises(
        Refusal, match=r"step back from production(.|\n)*overall: 1.600 against 1.650 \(-0.090 to -0.010"
    ):
        release.promote(root)
    _beside(root, draft, production, -0.09, 0.01, ratio_high=0.99)
    with pytest.raises(Refusal, match=r"throughput at concurrency 4: 0.950 of production's \(0.900 to 0.990\)"):
        release.promote(root)
    _beside(root, draft, production, -0.09, 0.01)
    made = release.promote(root)
    assert release.ledger(root)[-1]["words"] == "measured beside production: accept length 1.600 against 1.650"
    assert "evidence/beside_production.json" in made.record.files
    assert "## Beside production" in (root / "releases" / made.name / "model_card.md").read_text()


@pytest.mark.parametrize("what", ["the new draft", "production's draft", "the engine"])
def test_a_comparison_of_another_run_is_refused(pair: tuple[Path, str, DraftRecord], what: str) -> None:
    root, production, draft = pair
    _beside(root, draft, production, -0.1, 0.1)
    change = {
        "the new draft": {"draft_digest": "sha256:1"},
        "production's draft": {"production_draft_digest": "sha256:1"},
        "the engine": {"engine_version": "2"},
    }[what]
    BesideProduction.read(root / BESIDE).model_copy(update=change).write(root / BESIDE)
    with pytest.raises(Refusal, match=f"of another run: {what} differs"):
        release.promote(root)


def _judge_again(root: Path, draft: DraftRecord) -> None:
    path = root / report_path("deployment")
    report = GateReport.read(path)
    assert report.subject_digest == draft.digest()
    report.model_copy(update={"evidence": evidence_digests(root)}).write(path)


def test_a_benchmark_of_another_engine_version_is_refused(tmp_path: Path) -> None:
    draft = write_draft(tmp_path)
    path = tmp_path / BENCHMARK_EVIDENCE
    BenchmarkEvidence.read(path).model_copy(update={"engine_version": "2"}).write(path)
    _judge_again(tmp_path, draft)
    with pytest.raises(
        Refusal, match=r"validated in one engine and timed in another(.|\n)*in_process 1, as(.|\n)*in_process 2"
    ):
        release.promote(tmp_path)


@pytest.mark.parametrize("gate", ["extraction", "training"])
def test_every_gate_has_to_have_passed(tmp_path: Path, gate: str) -> None:
    write_draft(tmp_path)
    of = {"extraction": "extraction", "training": "training"}[gate]
    gate_report(of, "sha256:" + "0" * 64, success=False).write(tmp_path / f"reports/gates/{gate}.json")  # type: ignore[arg-type]
    with pytest.raises(Refusal, match=f"gate-{gate} refused this"):
        release.promote(tmp_path)


def test_gate_training_has_to_have_judged_what_this_draft_was_trained_on(tmp_path: Path) -> None:
    write_draft(tmp_path)
    gate_report("training", "sha256:" + "1" * 64).write(tmp_path / "reports/gates/training.json")
    with pytest.raises(Refusal, match="gate-training judged something else"):
        release.promote(tmp_path)


def test_the_model_card_tells_the_facts_and_equal_facts_give_equal_bytes(tmp_path: Path) -> None:
    draft = write_draft(tmp_path)
    made = release.promote(tmp_path)
    card = (tmp_path / "releases" / made.name / "model_card.md").read_text()
    for words in (
        "# eagle3 draft for tiny",
        draft.digest(),
        "Trained on the states after 1, 3, 5 of 6 layers. config.json is written for sglang: layer ids 0, 2, 4.",
        "its sources are not at hand here",
        "| coding | 1.6 | 1.50..1.70 |",
        "## Serving policy",
        "| deployment | 1 of 1 checks |",
        "1.30 (1.20..1.40)",
    ):
        assert words in card
    assert release.contents(tmp_path).texts["model_card.md"].decode() == card
    assert feeding(tmp_path / "models/draft") == []
