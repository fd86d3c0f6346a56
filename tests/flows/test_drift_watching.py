"""The watch: quiet on noise, quick on a fall, and right about what changed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flows.drifting import sequential, state
from flows.drifting.endpoint import Look
from flows.drifting.metrics import Reading
from flows.drifting.state import Watch
from flows.drifting.watching import Expected, Verdict, divergence, judge, take
from stages.contracts.errors import DataError
from stages.contracts.params import Drift

EXPECTED = Expected("r1", 1.8, 1.7, 1.9, {"coding": 1.7, "general": 1.5}, 3)
PARAMS = Drift(
    endpoints=("http://a",),
    window_minutes=60,
    min_verifications=1000,
    reference_windows=48,
    min_fall=0.1,
    false_alarms_a_year=1.0,
    quiet_windows=24,
    timeout_s=1.0,
)


class Served:
    """A server's counters, as traffic goes through it. The states of requests are drawn, not the figures that come out."""

    def __init__(self, seed: int = 1) -> None:
        self.chance, self.counters = random.Random(seed), {"t": 0.0, "v": 0.0, "r": 0.0, "p": 0.0, "b1": 0.0, "b2": 0.0}
        self.identity = {"engine": "sglang", "version": "0.5.23", "target": "/models/target"}
        self.prompt = 200.0

    def hour(self, accept_length: float, requests: int = 60) -> Look:
        for _ in range(requests):
            mean = accept_length + self.chance.gauss(
                0, 0.25
            )  # answers differ, so windows scatter more than verifications
            verified = self.chance.randint(20, 60)
            tokens = sum(max(1.0, min(4.0, self.chance.gauss(mean, 0.9))) for _ in range(verified))
            prompt = max(1.0, self.chance.gauss(self.prompt, 40))
            for key, more in (
                ("t", tokens),
                ("v", verified),
                ("r", 1),
                ("p", prompt),
                ("b1", prompt <= 300),
                ("b2", 1),
            ):
                self.counters[key] += more
        quantity = {"t": "tokens", "v": "verifications", "r": "requests", "p": "prompt_tokens"}
        bucket = {"b1": 300.0, "b2": float("inf")}
        return Look(Reading("sglang", dict(self.counters), quantity, bucket), dict(self.identity))  # type: ignore[arg-type]


def run(watch: Watch, served: Served, accept_length: float, hours: int) -> list[Verdict]:
    told = []
    for _ in range(hours):
        take(watch, {"http://a": served.hour(accept_length)})
        told.append(judge(watch, EXPECTED, PARAMS, "2026-01-01T00:00:00Z"))
    return told


@pytest.fixture
def learnt() -> tuple[Watch, Served]:
    watch, served = Watch(release="r1"), Served()
    take(watch, {"http://a": served.hour(1.8)})
    told = run(watch, served, 1.8, 48)
    assert [v.status for v in told] == ["learning"] * 47 + ["steady"]
    assert "normal here is 1.8" in told[-1].words and "1.700 to 1.900" in told[-1].words
    return watch, served


def test_steady_traffic_is_no_alarm_and_a_fall_is_one_within_hours_and_one_event(learnt: tuple[Watch, Served]) -> None:
    watch, served = learnt
    assert {v.status for v in run(watch, served, 1.8, 100)} == {"steady"}
    told = run(watch, served, 1.55, 12)
    first = next(i for i, v in enumerate(told) if v.status == "fallen")
    assert 1 <= first <= 5
    assert told[first].event and told[first].cause == "unexplained"
    assert "other topics, or a target that changed under its name" in told[first].words
    assert [v.event for v in told].count(True) == 1, "one fall starts one retrain"


def test_a_small_window_waits_for_the_next_and_loses_nothing(learnt: tuple[Watch, Served]) -> None:
    watch, served = learnt
    before = served.counters["v"]
    for _ in range(3):
        take(watch, {"http://a": served.hour(1.8, requests=2)})
        assert judge(watch, EXPECTED, PARAMS, "t").status == "waiting"
    take(watch, {"http://a": served.hour(1.8, requests=60)})
    assert judge(watch, EXPECTED, PARAMS, "t").status == "steady"
    assert watch.windows[-1].verifications == served.counters["v"] - before


@pytest.mark.parametrize(
    ("name", "value", "cause", "words"),
    [
        ("version", "0.6.0", "engine", "another engine: version: 0.5.23 -> 0.6.0"),
        ("target", "/models/newer", "target", "another target: target: /models/target -> /models/newer"),
    ],
)
def test_a_fall_with_another_engine_or_target_names_it(
    learnt: tuple[Watch, Served], name: str, value: str, cause: str, words: str
) -> None:
    watch, served = learnt
    run(watch, served, 1.8, 20)
    served.identity[name] = value
    fallen = next(v for v in run(watch, served, 1.5, 8) if v.status == "fallen")
    assert fallen.cause == cause and words in fallen.words


def test_a_fall_with_other_requests_is_told_from_one_without(learnt: tuple[Watch, Served]) -> None:
    watch, served = learnt
    served.prompt = 900.0
    fallen = next(v for v in run(watch, served, 1.5, 8) if v.status == "fallen")
    assert fallen.cause == "traffic" and "tokens a prompt, 200 before" in fallen.words
    assert "Jensen-Shannon" in fallen.words


def test_an_upgrade_without_a_fall_is_no_alarm(learnt: tuple[Watch, Served]) -> None:
    watch, served = learnt
    served.identity["version"] = "0.6.0"
    assert {v.status for v in run(watch, served, 1.8, 40)} == {"steady"}
    assert sum(bool(w.changed) for w in watch.windows) == 1


def test_a_draft_that_never_was_as_good_as_its_release_is_told_once_normal_is_known() -> None:
    watch, served = Watch(release="r1"), Served()
    take(watch, {"http://a": served.hour(0.8)})
    told = run(watch, served, 0.8, 48)
    assert told[-1].status == "below the release" and told[-1].event
    assert "no domain of it below 1.500" in told[-1].words


def test_more_tokens_than_can_be_drafted_are_not_compared(learnt: tuple[Watch, Served]) -> None:
    watch, served = learnt
    take(watch, {"http://a": served.hour(1.8)})
    watch.open.tokens = 5 * watch.open.verifications
    told = judge(watch, EXPECTED, PARAMS, "t")
    assert told.status == "not comparable" and "speculation was off for a part" in told.words
    assert watch.statistic < 3


def test_another_release_begins_anew_and_the_memory_survives_the_disk(
    learnt: tuple[Watch, Served], tmp_path: Path
) -> None:
    watch, _ = learnt
    state.write(tmp_path, watch)
    again = state.read(tmp_path)
    assert again == watch and again.windows[0].lengths[float("inf")] >= 0
    new = again.of("r2")
    assert new.reference == [] and new.counters == again.counters
    (tmp_path / state.STATE).write_text("{")
    with pytest.raises(DataError, match=r"memory cannot be read[\s\S]*remove it"):
        state.read(tmp_path)


def test_the_threshold_gives_the_time_between_false_alarms_that_it_is_asked_for() -> None:
    """Page's CUSUM on independent draws, against Siegmund's formula, within the spread of 300 runs."""
    chance, k = random.Random(3), 0.5
    h = sequential.threshold(k, 500)
    lengths = []
    for _ in range(300):
        s, n = 0.0, 0
        while s <= h:
            s, n = max(0.0, s + chance.gauss(0, 1) - k), n + 1
        lengths.append(n)
    assert sum(lengths) / len(lengths) == pytest.approx(500, rel=0.25)


def test_one_verification_varies_as_a_chain_of_drafted_tokens_does() -> None:
    chance = random.Random(5)
    draws = []
    for _ in range(40000):
        n = 1
        while n < 4 and chance.random() < 0.5:
            n += 1
        draws.append(n)
    mean = sum(draws) / len(draws)
    variance = sum((d - mean) ** 2 for d in draws) / len(draws)
    assert sequential.verification_variance(mean, 3) == pytest.approx(variance, rel=0.03)


def test_the_divergence_of_equal_histograms_is_zero_and_of_disjoint_ones_a_bit() -> None:
    assert divergence({1.0: 3, 2.0: 1}, {1.0: 6, 2.0: 2}) == pytest.approx(0)
    assert divergence({1.0: 3}, {2.0: 2}) == pytest.approx(1)
    assert divergence({}, {2.0: 2}) == 0
