from __future__ import annotations

import math
import random

import pytest

from stages.acceptance.lengths import Answer
from stages.acceptance.sweep import Trial, confidence_at_once, describe_arm, paired_interval, ratio_over_plain, turns


def test_every_arm_comes_once_a_repeat_and_first_in_turn() -> None:
    order = list(turns(["a", "b", "c"], 3))
    assert [arm for _, arm in order] == list("abcbcacab")
    assert [repeat for repeat, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_interval_is_that_of_paired_repeats() -> None:
    """A machine twice as slow in one repeat is slow for both arms: pairs agree where means would not."""
    median, low, high = paired_interval([12.0, 6.1, 12.1], [10.0, 5.0, 10.0])
    assert median == pytest.approx(1.21)
    logs = [math.log(x) for x in (1.2, 1.22, 1.21)]
    mean = sum(logs) / 3
    sd = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    assert low == pytest.approx(math.exp(mean - 4.302653 * sd / math.sqrt(3)), rel=1e-6)
    assert high == pytest.approx(math.exp(mean + 4.302653 * sd / math.sqrt(3)), rel=1e-6)
    assert 1.1 < low < median < high


def test_five_loads_judged_at_once_raise_a_false_alarm_as_seldom_as_one() -> None:
    """Two arms that are truly equal, four repeats, 3 % of noise: below plain at any of five loads in at most 2.5 % of runs."""
    noise, runs = random.Random(7), 2000
    alarms = {1: 0, 5: 0}

    def arm() -> list[float]:
        return [math.exp(noise.gauss(0, 0.03)) for _ in range(4)]

    for _ in range(runs):
        loads = [(arm(), arm()) for _ in range(5)]
        for statements in alarms:
            highs = [paired_interval(*load, confidence_at_once(statements))[2] for load in loads]
            alarms[statements] += min(highs) < 1
    assert alarms[5] / runs < 0.04 < 0.08 < alarms[1] / runs


def trial(speed: float, latencies: tuple[float, ...], accepted: tuple[int, ...]) -> Trial:
    answers = tuple(Answer(sum(accepted) + len(accepted) + 1, accepted) for _ in latencies)
    return Trial(speed, latencies, tuple(x / 10 for x in latencies), answers)


def test_an_arm_has_percentiles_over_all_requests_of_all_repeats() -> None:
    trials = [trial(10.0, (100.0, 200.0), (1, 0)), trial(12.0, (300.0, 400.0), (1, 2))]
    arm = describe_arm("speculative", 3, 2, trials)
    assert (arm.latency_p50_ms, arm.first_token_p50_ms) == (250.0, 25.0)
    assert arm.latency_p95_ms == pytest.approx(385.0)
    assert arm.accept_length == pytest.approx((2 * 4 + 2 * 6) / 8)
    assert describe_arm("plain", 0, 2, trials).accept_length == 1.0
    found = ratio_over_plain("policy", 1, 2, trials, trials)
    assert (found.ratio, found.low, found.high) == (1.0, 1.0, 1.0)
