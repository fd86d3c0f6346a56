"""Sweeps, arrivals and conditions against servers with SGLang's manners: what is timed, and what is refused."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages import _bench
from stages._bench_served import ServedBench, _gpus_apart
from stages.acceptance.prompts import Prompt
from stages.contracts.errors import EngineError, ParamsError
from stages.contracts.files import canonical
from stages.contracts.params import Params, load_params
from stages.engines.sglang import Server
from tests.engines.test_sglang_server import Pretend, started
from tests.engines.test_sglang_server import pretend as pretend

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = [Prompt(f"p{i}", "code", "coding", tuple(range(3, 6 + i))) for i in range(4)]
SPECULATIVE = _bench.Way("speculative", 3, 3)


def raw(**sections: dict[str, Any]) -> dict[str, Any]:
    told = yaml.safe_load((ROOT / "params/smollm2-135m.yaml").read_text())
    told["serve"] |= {"engine": "sglang", "sampling_prompts": 0}
    told["benchmark"] |= {
        "concurrencies": [1, 2], "draft_steps": [3], "requests": 2, "max_new_tokens": 9, "repeats": 3,
        "arrival_rates": [20.0, 400.0], "arrival_requests": 4,
    }  # fmt: skip
    for name, values in sections.items():
        told[name] |= values
    return told


def params(**sections: dict[str, Any]) -> Params:
    return Params.model_validate(raw(**sections))


@contextmanager
def opened(pretend: Pretend, misdeeds: dict[str, Any] | None = None) -> Generator[ServedBench, None, None]:
    settings = pretend(misdeeds=misdeeds)
    with started(settings, draft=None, draft_steps=0) as plain, started(settings) as drafted:
        yield ServedBench(params(), {0: plain, 3: drafted})


def test_both_arms_are_measured_by_load_and_by_arrivals_under_conditions_that_are_told(
    pretend: Pretend, capfd: pytest.CaptureFixture[str]
) -> None:
    with opened(pretend) as bench:
        load = _bench.timed_load(params().benchmark, PROMPTS)
        first = _bench.first_requests(bench, load, [_bench.PLAIN, SPECULATIVE])
        arms, ratios = _bench.sweep(bench, load, lambda _: [SPECULATIVE], "sweep")
        found = _bench.open_loop(bench, load, [_bench.PLAIN, SPECULATIVE], arms)
        whole, domains = _bench.accept_lengths(bench, PROMPTS, 3, 9, "accept")
        assert _bench.off_cost(bench, load, 3) is None
        conditions = bench.conditions()
    assert [(a.name, a.draft_steps, a.concurrency) for a in arms] == [
        ("plain", 0, 1), ("speculative", 3, 1), ("plain", 0, 2), ("speculative", 3, 2),
    ]  # fmt: skip
    # nine tokens: one of the prompt's pass, three verifications of 3, 3 and 2 tokens
    assert {a.accept_length for a in arms if a.name == "speculative"} == {3.0} == {whole.accept_length if whole else 0}
    assert {a.accept_length for a in arms if a.name == "plain"} == {1.0} and set(domains) == {"coding"}
    for arm in arms:
        assert arm.latencies is not None and len(arm.tokens_per_s) == 3
        assert 0 < arm.latencies.first_token_ms.p50 <= arm.latencies.whole_ms.p50 <= arm.latencies.whole_ms.p99
    assert [(r.arm, r.concurrency) for r in ratios] == [("speculative", 1), ("speculative", 2)]
    assert [(o.arm, o.rate_per_s, o.requests) for o in found] == [
        (arm, rate, 12) for rate in (20.0, 400.0) for arm in ("plain", "speculative")
    ]
    assert all(o.overloaded == (o.rate_per_s > o.closed_loop_per_s) for o in found)
    assert found[0].tokens_per_s[0] < 4 * 9 / (4 / 20) * 1.1, (
        "four requests at 20 a second take a fifth of a second to come"
    )
    assert [f.arm for f in first] == ["plain", "speculative"] and all(f.cold_whole_ms > 0 for f in first)
    assert (conditions.engines, conditions.cache, conditions.cached_prompt_tokens) == ("servers started", "off", 0)
    assert conditions.settings_compared > 10
    assert "SGLang on a CPU" in conditions.warnings[0] and "SGLang on a CPU" in capfd.readouterr().err
    assert bench.device.startswith("cpu") and bench.engine_version == "sglang 0.5.23"


def test_a_slow_first_request_is_told_as_cold_and_no_part_of_what_is_timed(pretend: Pretend) -> None:
    with opened(pretend, {"first_hangs_s": 0.8}) as bench:
        load = _bench.timed_load(params().benchmark, PROMPTS)
        first = _bench.first_requests(bench, load, [_bench.PLAIN, SPECULATIVE])
        arms, _ = _bench.sweep(bench, load, lambda _: [SPECULATIVE], "sweep")
    for found in first:
        assert found.cold_first_token_ms >= 800 > found.warm_whole_ms
    assert all(a.latencies is not None and a.latencies.whole_ms.p99 < 800 for a in arms)


def test_tokens_from_a_cache_that_is_said_to_be_off_are_refused(pretend: Pretend) -> None:
    with (
        opened(pretend, {"cached": 2}) as bench,
        pytest.raises(EngineError, match="prefix cache that is said to be off"),
    ):
        _bench.trial(bench, _bench.PLAIN, PROMPTS[:1], 1, 4)


def test_a_cache_that_is_on_is_flushed_before_each_repeat_and_what_it_gave_is_counted(pretend: Pretend) -> None:
    flushed: list[int] = []
    with opened(pretend, {"cached": 2}) as started_so:
        on = {
            s.draft_steps: Server(s.client, s.info | {"disable_radix_cache": False}, s.draft_steps)
            for s in started_so.servers.values()
        }
        for server in on.values():
            honest = server.forget
            server.forget = lambda honest=honest: (flushed.append(1), honest())[1]  # type: ignore[method-assign]
        bench = ServedBench(params(), on)
        _bench.trial(bench, _bench.PLAIN, PROMPTS[:2], 1, 4)
        _bench.trial(bench, SPECULATIVE, PROMPTS[:2], 1, 4)
        conditions = bench.conditions()
    assert len(flushed) == 2
    assert (conditions.cache, conditions.cached_prompt_tokens) == ("flushed before each repeat", 8)


def test_a_server_that_answers_less_does_other_work_and_is_refused(pretend: Pretend) -> None:
    with opened(pretend, {"short": 2}) as bench, pytest.raises(EngineError, match="unequal work") as error:
        _bench.trial(bench, _bench.PLAIN, PROMPTS[:2], 1, 6)
    assert error.value.got == "4, 4" and "p0, p1" in error.value.where


def test_servers_under_unequal_settings_are_not_timed(pretend: Pretend) -> None:
    settings = pretend()
    with (
        started(settings, draft=None, draft_steps=0, concurrency=64) as plain,
        started(settings) as drafted,
        pytest.raises(EngineError, match="max_running_requests: 64 and 8"),
    ):
        ServedBench(params(), {0: plain, 3: drafted})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"benchmark": {"arrival_rates": [0.0]}}, "benchmark.arrival_rates.0: must be more than 0"),
        ({"benchmark": {"arrival_rates": [float("inf")]}}, "benchmark.arrival_rates.0"),
        ({"benchmark": {"arrival_rates": [4.0, 2.0]}}, r"arrival_rates \[4.0, 2.0\] are not ascending"),
        ({"benchmark": {"arrival_rates": [0.001]}}, "4 requests would take 4000 s to arrive"),
        ({"serve": {"engine": "in_process"}}, "the engine in this process takes all requests at once"),
        ({"benchmark": {"draft_steps": [1, 2]}}, r"draft_steps \[1, 2\] lacks serve.draft_steps 3"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_rates_and_lengths_that_make_no_sense_are_no_params(
    tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(raw(**sections)))
    with pytest.raises(ParamsError, match=words):
        load_params(path)


def test_a_running_server_has_one_draft_length(tmp_path: Path) -> None:
    told = raw(benchmark={"draft_steps": [1, 3]})
    told["serve"]["sglang"] |= {"url": "http://127.0.0.1:1", "plain_url": "http://127.0.0.1:2"}
    (tmp_path / "params.yaml").write_bytes(canonical(told))
    with pytest.raises(ParamsError, match="a server that runs already drafts one number of tokens, 3"):
        load_params(tmp_path / "params.yaml")


@pytest.mark.parametrize(("gpus", "fraction", "apart"), [(2, 0.0, 1), (1, 0.45, 0), (1, 0.0, None), (1, 0.6, None)])
def test_servers_side_by_side_have_gpus_of_their_own_or_shares_of_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, fraction: float, apart: int | None
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    told = raw(target={"device": "cuda"})
    told["serve"]["sglang"] |= {"memory_fraction": fraction}
    found = Params.model_validate(told)
    if apart is not None:
        assert _gpus_apart(found, 2) == apart
        return
    with pytest.raises(EngineError, match="do not fit on these GPUs side by side") as error:
        _gpus_apart(found, 2)
    assert "memory_fraction at most 0.47" in error.value.expected and "plain_url" in error.value.do
