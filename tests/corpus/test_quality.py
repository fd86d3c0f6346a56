"""Loops, doubles and leaks."""

from __future__ import annotations

import random

import pytest

from stages.corpus.quality import has_supervised_pair, normalised, prompt_overlap, prompt_text, repeats_itself
from stages.corpus.split import prompt_id, row_id, split_of


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5000), k=n)


@pytest.mark.parametrize("period", [1, 3, 10, 30])
def test_an_answer_that_runs_into_a_loop_is_repetitive(period: int) -> None:
    assert repeats_itself(words(20) + (words(period, 1) * 100)[: max(24, 3 * period)])


def test_a_loop_may_end_within_its_block() -> None:
    block = words(10, 1)
    assert repeats_itself(words(20) + block * 3 + block[:4])


def test_a_loop_with_a_counter_is_seen_by_its_few_distinct_n_grams() -> None:
    line = words(12, 2)
    assert repeats_itself([token for i in range(9) for token in [*line, 9000 + i]])


def test_plain_text_short_repeats_and_code_that_closes_brackets_are_not_repetitive() -> None:
    assert not repeats_itself(words(200))
    assert not repeats_itself([*words(40), 7, 7, 7, 7])
    assert not repeats_itself([*words(40), *words(5, 3) * 2])
    assert not repeats_itself([])


def test_a_pair_needs_two_neighbours() -> None:
    assert not has_supervised_pair([0, 1, 0, 1])
    assert not has_supervised_pair([])
    assert has_supervised_pair([0, 1, 1])


def test_equal_prompts_overlap_whatever_their_case_spacing_and_punctuation() -> None:
    found = prompt_overlap({"h": normalised("Why is\n the sky BLUE?")}, {"t": normalised("why is the sky  blue")})
    assert found["h"].train == "t" and found["h"].share == 1.0


def test_a_prompt_held_within_a_longer_one_overlaps_and_an_unlike_one_does_not() -> None:
    held = "write a function that returns the sum of all even numbers in a list"
    train = {"a": f"please {held} and test it", "b": "write a function that reverses every word of a given text"}
    assert prompt_overlap({"h": held}, train)["h"].train == "a"
    assert prompt_overlap({"h": held}, {"b": train["b"]}) == {}


def test_the_nearest_training_prompt_is_named() -> None:
    held = " ".join(f"w{i}" for i in range(20))
    half = " ".join(f"w{i}" for i in range(12)) + " something else"
    found = prompt_overlap({"h": held}, {"half": half, "all": held})
    assert (found["h"].train, found["h"].share) == ("all", 1.0)
    assert 0.3 < prompt_overlap({"h": held}, {"half": half})["h"].share < 0.5


def test_the_text_of_a_prompt_is_what_the_user_says_before_the_first_answer() -> None:
    turns = [("system", "Be kind."), ("user", "One?"), ("assistant", "1"), ("user", "Two?")]
    assert prompt_text([{"role": r, "content": c} for r, c in turns]) == "one"


def test_a_prompt_stays_on_its_side_and_the_share_is_kept() -> None:
    ids = [prompt_id([i, i + 1]) for i in range(4000)]
    sides = [split_of(p, 7, 0.12) for p in ids]
    assert sides == [split_of(p, 7, 0.12) for p in ids]
    assert 0.10 < sides.count("held_out") / len(sides) < 0.14
    assert {p for p in ids if split_of(p, 7, 0.05) == "held_out"} < {
        p for p in ids if split_of(p, 7, 0.12) == "held_out"
    }
    assert sides != [split_of(p, 8, 0.12) for p in ids]


def test_ids_are_of_content() -> None:
    assert len(prompt_id([1, 2])) == 24 and prompt_id([1, 2]) != prompt_id([2, 1])
    assert row_id([1, 2], [0, 1]) != row_id([1, 2], [1, 1])
