"""The paired difference of two drafts' accept lengths: known numbers, and intervals that hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from stages.acceptance.beside import FEWEST, difference, domains_told
from stages.acceptance.lengths import Answer


def _answers(rng: np.random.Generator, tokens: np.ndarray, keeps: np.ndarray) -> list[Answer]:
    """Answers of these lengths by a draft whose three tokens are each kept with the request's chance."""
    made = []
    for total, keep in zip(tokens.tolist(), keeps.tolist(), strict=True):
        accepted, have = list[int](), 1
        while have < total:
            kept = int(np.argmin(np.append(rng.random(3) < keep, False)))
            accepted.append(min(kept, total - have - 1))
            have += accepted[-1] + 1
        made.append(Answer(int(total), tuple(accepted)))
    return made


def _pair(rng: np.random.Generator, requests: int, gain: float) -> tuple[list[Answer], list[Answer]]:
    tokens, keeps = rng.integers(20, 80, requests), rng.beta(3, 4, requests)
    return _answers(rng, tokens, np.clip(keeps + gain, 0, 1)), _answers(rng, tokens, keeps)


def test_the_difference_is_that_of_two_ratios_and_equal_answers_differ_by_nothing() -> None:
    new, old = [Answer(9, (1, 1, 1, 1)), Answer(5, (1, 1))], [Answer(9, (0,) * 8), Answer(5, (0,) * 4)]
    found = difference(new, old, 0.95)
    assert (found.new, found.old, found.requests) == (14 / 6, 14 / 12, 2)
    assert found.low < 14 / 6 - 14 / 12 < found.high
    same = difference(old, old, 0.95)
    assert (same.low, same.high) == (0.0, 0.0)


def test_answers_of_one_token_count_as_plain_decoding() -> None:
    found = difference([Answer(1, ()), Answer(1, ())], [Answer(1, ()), Answer(1, ())], 0.95)
    assert (found.new, found.old, found.low, found.high) == (1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("requests", [6, 40])
def test_two_equal_drafts_are_told_apart_as_rarely_as_the_confidence_says(requests: int) -> None:
    rng = np.random.default_rng(3)
    apart = sum(not (d.low <= 0 <= d.high) for d in (difference(*_pair(rng, requests, 0.0), 0.9) for _ in range(200)))
    assert 0.05 <= apart / 200 <= 0.15, "10 % were promised"


def test_a_worse_draft_is_found_and_the_pairs_are_what_finds_it() -> None:
    rng = np.random.default_rng(5)
    new, old = _pair(rng, 40, -0.08)
    paired, shuffled = difference(new, old, 0.99), difference(new, old[::-1], 0.99)
    assert paired.high < 0
    assert paired.high - paired.low < 0.8 * (shuffled.high - shuffled.low)


def test_a_domain_of_few_requests_is_not_told_by_itself() -> None:
    assert domains_told(["coding"] * FEWEST + ["general"] * (FEWEST - 1)) == ["coding"]
