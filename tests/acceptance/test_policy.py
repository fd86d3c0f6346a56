from __future__ import annotations

import math
import random

import pytest

from stages.acceptance.lengths import Answer
from stages.acceptance.policy import choose_levels, choose_policy, speculation_off_above
from stages.acceptance.sweep import Trial, confidence_at_once, describe_arm, paired_interval, ratio_over_plain, turns
from stages.contracts.errors import DataError
from stages.contracts.evidence import Ratio, ServingPolicy

# Throughput over no speculation by batch size, as published (Llama-3.1-8B on one H100, chains).
EAGLE3_SGLANG = {2: 1.81, 4: 1.82, 8: 1.62, 16: 1.48, 24: 1.39, 32: 1.32, 48: 1.38, 56: 1.34, 64: 1.38}
EAGLE_SGLANG = {2: 1.40, 4: 1.38, 8: 1.23, 16: 1.02, 24: 0.93, 32: 0.94, 48: 0.88, 56: 0.99, 64: 0.99}
EAGLE3_VLLM = {2: 1.75, 4: 1.68, 8: 1.58, 16: 1.49, 24: 1.42, 32: 1.36, 48: 1.21, 56: 1.01}


def ratio(concurrency: int, middle: float, half: float = 0.05, steps: int = 3) -> Ratio:
    return Ratio(
        arm="speculative",
        draft_steps=steps,
        concurrency=concurrency,
        ratio=middle,
        low=middle - half,
        high=middle + half,
    )


def policy(ratios: list[Ratio]) -> ServingPolicy:
    return choose_policy(ratios, draft_digest="sha256:0", engine="in_process", engine_version="1", device="cpu")


@pytest.mark.parametrize(
    ("sweep", "off_above"),
    [(EAGLE3_SGLANG, None), (EAGLE_SGLANG, 8), (EAGLE3_VLLM, 48)],
    ids=["EAGLE-3 in SGLang", "EAGLE in SGLang", "EAGLE-3 in vLLM"],
)
def test_published_sweeps_give_careful_thresholds(sweep: dict[int, float], off_above: int | None) -> None:
    chosen = policy([ratio(c, r) for c, r in sweep.items()])
    assert speculation_off_above(chosen) == off_above
    assert chosen.measured_up_to == max(sweep)
    for batch in range(1, 200):
        on = batch <= (off_above or chosen.measured_up_to)
        assert chosen.steps_for(batch) == (3 if on else 0)


def test_a_gain_within_the_noise_is_no_gain() -> None:
    assert speculation_off_above(policy([ratio(1, 1.08, half=0.02), ratio(2, 1.08, half=0.09)])) == 1


def test_what_is_off_stays_off_at_larger_batches() -> None:
    chosen = policy([ratio(1, 1.3), ratio(4, 0.9), ratio(8, 1.2)])
    assert [level.draft_steps for level in chosen.levels] == [3, 0, 0]
    assert chosen.levels[2].ratio == 1.2  # the figure is kept, for a reader to wonder at


def test_a_batch_between_two_measured_ones_goes_by_the_larger() -> None:
    chosen = policy([ratio(1, 1.3, steps=2), ratio(4, 1.2, steps=1), ratio(16, 0.7, steps=1)])
    assert [chosen.steps_for(batch) for batch in (1, 2, 4, 5, 16)] == [2, 1, 1, 0, 0]


def test_the_draft_length_with_the_best_lower_end_wins_and_the_shorter_of_equals() -> None:
    levels = choose_levels([ratio(1, 1.3, 0.2, steps=3), ratio(1, 1.25, 0.05, steps=2), ratio(1, 1.25, 0.05, steps=1)])
    assert levels[0].draft_steps == 1


def test_never_on_is_zero_and_nothing_measured_is_an_error() -> None:
    assert speculation_off_above(policy([ratio(1, 0.9), ratio(2, 0.8)])) == 0
    with pytest.raises(DataError, match="Nothing was measured"):
        choose_levels([])


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
