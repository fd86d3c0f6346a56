"""stages/benchmark.py on the tiny line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages import _bench, benchmark, extract, merge, serve_validate, train
from stages._bench_here import BenchHere
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import EngineError, Refusal
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    BenchmarkEvidence,
    ServeEvidence,
    ServingPolicy,
)
from stages.contracts.manifest import MERGED_MANIFEST, MergedManifest
from stages.drafts._decode import DraftDecoder
from tests import line, tiny

CONCURRENCIES = [1, 2, 4]


@pytest.fixture(scope="module")
def served_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything up to serve-validate has run."""
    root = tmp_path_factory.mktemp("line")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        target = tiny.make_target(root / "target")
        prepared = line.write_prepared(root, target)
        bench = {
            "concurrencies": CONCURRENCIES,
            "draft_steps": [1, 2],
            "requests": 2,
            "max_new_tokens": 6,
            "repeats": 3,
        }
        serve = {"prompts_per_source": 1, "max_new_tokens": 8, "sampling_prompts": 0, "draft_steps": 2}
        line.write_params(root, target, {"benchmark": bench, "serve": serve})
        line.write_gate_report(root, "extraction", prepared.digest())
        extract.main()
        merge.main()
        line.write_gate_report(root, "training", MergedManifest.read(MERGED_MANIFEST).digest())
        train.main()
        serve_validate.main()
    return root


@pytest.fixture
def here(served_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the line, as the current folder."""
    shutil.copytree(served_line, tmp_path / "line")
    monkeypatch.chdir(tmp_path / "line")
    threads = torch.get_num_threads()
    yield Path()
    torch.set_num_threads(threads)


def test_every_arm_is_measured_at_every_concurrency_and_the_policy_written_is_the_one_measured(here: Path) -> None:
    benchmark.main()
    evidence, policy = BenchmarkEvidence.read(BENCHMARK_EVIDENCE), ServingPolicy.read(POLICY)
    served = ServeEvidence.read(SERVE_EVIDENCE)
    assert evidence.draft_digest == policy.draft_digest == served.draft_digest
    assert (evidence.engine, evidence.engine_version) == (policy.engine, policy.engine_version)
    assert evidence.engine_version == served.engine_version
    assert evidence.policy_digest == policy.digest()
    named = sorted((a.name, a.draft_steps, a.concurrency) for a in evidence.arms if a.name != "policy")
    assert named == sorted(
        (n, k, c) for c in CONCURRENCIES for n, k in (("plain", 0), ("speculative", 1), ("speculative", 2))
    )
    for arm in evidence.arms:
        assert len(arm.tokens_per_s) == 3 and min(arm.tokens_per_s) > 0
        assert 0 < arm.first_token_p50_ms <= arm.latency_p50_ms <= arm.latency_p95_ms
        assert arm.latencies is not None and arm.latencies.first_token_ms.p50 == arm.first_token_p50_ms
        assert 0 < arm.latencies.per_token_ms.p50 <= arm.latencies.per_token_ms.p90 <= arm.latencies.per_token_ms.p99
        assert 1 <= arm.accept_length <= arm.draft_steps + 1 + 1e-9 or arm.accept_length <= 6 / 2
    by_policy = {r.concurrency: r for r in evidence.ratios if r.arm == "policy"}
    assert {c: r.draft_steps for c, r in by_policy.items()} == {c: policy.steps_for(c) for c in CONCURRENCIES}
    assert {round(r.confidence, 6) for r in by_policy.values()} == {round(1 - 0.05 / len(CONCURRENCIES), 6)}
    for r in evidence.ratios:
        assert 0 < r.low <= r.ratio <= r.high
    assert evidence.off_cost_ratio is not None and 0.3 < evidence.off_cost_ratio < 3
    assert [(f.arm, f.draft_steps) for f in evidence.first_requests] == [
        ("plain", 0),
        ("speculative", 1),
        ("speculative", 2),
    ]
    assert all(0 < f.cold_first_token_ms <= f.cold_whole_ms and f.warm_whole_ms > 0 for f in evidence.first_requests)
    assert evidence.conditions is not None and evidence.conditions.engines == "in this process"
    assert (evidence.open_loop, evidence.conditions.policy_served_by) == ((), "one engine")
    assert set(evidence.accept_length_by_domain) == {"agentic", "coding", "general"}
    assert evidence.out_of_distribution is not None and evidence.out_of_distribution.requests == 4
    assert "cpu" in evidence.device and "threads" in evidence.device


def opened() -> tuple[BenchHere, _bench.Load]:
    params = benchmark.load_params()
    prompts = benchmark.held_out_prompts(benchmark.PreparedManifest.read(benchmark.PREPARED_MANIFEST))
    with benchmark.open_bench(params, DraftRecord.read(DRAFT / DRAFT_RECORD), prompts) as bench:
        assert isinstance(bench, BenchHere)
        return bench, _bench.timed_load(params.benchmark, prompts)


def test_the_draft_is_left_alone_while_off_is_timed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain arms and the off engine run with the draft loaded: it must not be called."""
    calls = [0]
    feed = DraftDecoder.feed
    monkeypatch.setattr(DraftDecoder, "feed", lambda *a: (calls.__setitem__(0, calls[0] + 1), feed(*a))[1])
    bench, load = opened()
    assert bench.loaded._aux is None
    assert _bench.off_cost(bench, load, steps=2) is not None
    assert calls == [0]
    assert bench.loaded._aux is not None, "off must be timed as the policy serves it: the states kept for smaller loads"
    assert bench.loaded.draft is not None and bench.never_on.draft is None
    _bench.trial(bench, _bench.Way("speculative", 1, 1), load.at(2), 2, 6)
    assert calls[0] > 0


def test_repeats_are_whole_rounds_of_the_concurrency(here: Path) -> None:
    _, load = opened()
    assert [len(load.at(c)) for c in (1, 2, 4, 8, 3)] == [2, 2, 4, 8, 3]


def test_a_draft_that_was_not_validated_is_not_timed(here: Path) -> None:
    evidence = ServeEvidence.read(SERVE_EVIDENCE)
    evidence.model_copy(update={"draft_digest": "sha256:0"}).write(SERVE_EVIDENCE)
    with pytest.raises(Refusal, match="looked at something else") as refusal:
        benchmark.main()
    assert "dvc repro serve-validate" in str(refusal.value)
    assert not POLICY.exists()


def test_weights_that_are_not_the_records_are_not_timed(here: Path) -> None:
    weights = Path("models/draft/model.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Refusal, match="weights are not those of its record") as refusal:
        benchmark.main()
    assert "model.safetensors" in refusal.value.where and "dvc repro train" in refusal.value.do
    assert not POLICY.exists()


def test_without_out_of_distribution_prompts_there_is_no_figure(here: Path) -> None:
    bench, _ = opened()
    assert _bench.accept_lengths(bench, [], 2, 6, "none") == (None, {})


def test_answers_of_another_length_are_not_timed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms that answer less do less: here the engine stops at end of turn though it was told not to."""
    bench, load = opened()
    short = bench.serve(_bench.PLAIN, [bench.request(p, 5, True) for p in load.at(1)], concurrency=1)
    monkeypatch.setattr(bench, "serve", lambda *what, **how: short)
    with pytest.raises(EngineError, match="arms do unequal work") as error:
        _bench.trial(bench, _bench.PLAIN, load.at(1), 1, 6)
    assert "6 tokens each" in error.value.expected and error.value.got == "5, 5"
