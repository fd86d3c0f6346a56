"""The convention, in numbers."""

from __future__ import annotations

import pytest

from stages.acceptance.lengths import Answer, accept_length, by_domain, by_length, gain


def test_accept_length_is_tokens_over_verifications_with_bonus_and_first_token() -> None:
    # first token, then 3 + 1, 0 + 1, 1 + 1: 8 tokens in 3 verifications
    found = accept_length([Answer(8, (3, 0, 1))], draft_steps=3)
    assert (found.tokens, found.verifications) == (8, 3)
    assert found.accept_length == pytest.approx(8 / 3)
    assert found.by_position == pytest.approx((2 / 3, 1 / 3, 1 / 3))


def test_answers_are_summed_and_not_averaged() -> None:
    found = accept_length([Answer(9, (3, 3)), Answer(2, (0,))], draft_steps=3)
    assert found.accept_length == pytest.approx(11 / 3)
    assert found.requests == 2


def test_nothing_verified_is_plain_decoding() -> None:
    for answers in ([], [Answer(1, ())], [Answer(0, ())]):
        found = accept_length(answers, draft_steps=2)
        assert (found.accept_length, found.low, found.high, found.by_position) == (1.0, 1.0, 1.0, (0.0, 0.0))


def test_the_interval_holds_the_value_is_seeded_and_shrinks_with_requests() -> None:
    answers = [Answer(2 + i % 3 * 2, (i % 3, 0)) for i in range(12)]
    few, many = accept_length(answers, 3, seed=1), accept_length(answers * 20, 3, seed=1)
    assert few == accept_length(answers, 3, seed=1)
    assert few.low < few.accept_length < few.high
    assert many.high - many.low < (few.high - few.low) / 3


def test_equal_answers_have_no_spread() -> None:
    found = accept_length([Answer(5, (3,))] * 4, 3)
    assert (found.low, found.high) == (5.0, 5.0)


def test_domains_are_kept_apart() -> None:
    found = by_domain([Answer(5, (3,)), Answer(2, (0,)), Answer(4, (2,))], ["coding", "general", "coding"], 3)
    assert {d: (a.requests, a.accept_length) for d, a in found.items()} == {"coding": (2, 4.5), "general": (1, 2.0)}


def test_a_gain_over_the_same_answers_is_seen_where_two_intervals_overlap() -> None:
    before = [(20 + i % 7, 10 + i % 9) for i in range(40)]
    now = [(tokens, verifications - 1) for tokens, verifications in before]
    told = [accept_length([Answer(t, (0,) * v) for t, v in pairs], 3) for pairs in (before, now)]
    assert told[0].high > told[1].low, "apart, they could be one"
    here, low, high = gain(before, now)
    assert here == pytest.approx(told[1].accept_length - told[0].accept_length) and 0 < low < here < high


def test_no_gain_is_none() -> None:
    same = [(20, 10), (30, 9)]
    assert gain(same, same) == (0.0, 0.0, 0.0) and gain([], []) == (0.0, 0.0, 0.0)
    assert gain([(1, 0)], [(1, 0)]) == (0.0, 0.0, 0.0)


def test_prompts_are_bucketed_by_doubling_lengths() -> None:
    answers = [Answer(5, (3,)), Answer(2, (0,)), Answer(4, (2,)), Answer(3, (1,))]
    found = by_length(answers, [32, 33, 64, 80], 3)
    assert {name: (a.requests, a.accept_length) for name, a in found.items()} == {
        "1-32": (1, 5.0),
        "33-64": (2, 3.0),
        "65-128": (1, 3.0),
    }
    assert list(by_length(answers[:1], [3], 3)) == ["1-32"]
