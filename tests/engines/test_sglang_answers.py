"""SGLang's counts of an answer in this project's terms."""

from __future__ import annotations

import pytest

from stages.contracts.errors import EngineError
from stages.engines._sglang_answers import Mark, accepted_counts, mark_of, rows_of


def marks(*tokens: int, histogram: tuple[int, ...]) -> list[Mark]:
    """An event for each number of tokens so far; the last one has the counts."""
    return [*(Mark(n, 0, ()) for n in tokens[:-1]), Mark(tokens[-1], sum(histogram), histogram)]


def test_the_lengths_of_events_give_the_histogram_its_order_back() -> None:
    assert accepted_counts(marks(1, 4, 5, 7, histogram=(1, 1, 1)), "p") == (2, 0, 1)


def test_events_that_came_together_lose_the_order_and_nothing_else() -> None:
    assert accepted_counts(marks(1, 5, 7, histogram=(1, 1, 1)), "p") == (0, 1, 2)
    assert accepted_counts(marks(7, histogram=(1, 1, 1)), "p") == (0, 1, 2)


def test_in_order_the_last_verification_is_the_one_that_is_cut() -> None:
    assert accepted_counts(marks(1, 5, 6, 7, histogram=(1, 0, 1, 1)), "p") == (3, 0, 1)


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [
        (5, (3,)),  # three accepted, and the bonus
        (4, (3,)),  # the end of turn was the last accepted one: the bonus is gone, nothing else
        (3, (2,)),  # it was the second accepted one
        (2, (1,)),  # or the first
    ],
)
def test_what_was_accepted_behind_the_end_of_turn_is_not_counted(tokens: int, accepted: tuple[int, ...]) -> None:
    assert accepted_counts([Mark(1, 0, ()), Mark(tokens, 1, (0, 0, 0, 1))], "p") == accepted


def test_an_answer_of_one_token_needs_no_verification() -> None:
    assert accepted_counts([Mark(1, 0, ())], "p") == ()


@pytest.mark.parametrize("last", [Mark(9, 2, (1, 1)), Mark(3, 3, (1, 0, 1)), Mark(2, 2, (1, 0, 1)), Mark(5, 0, ())])
def test_counts_that_contradict_each_other_are_refused(last: Mark) -> None:
    with pytest.raises(EngineError, match="counts of an answer contradict each other"):
        accepted_counts([Mark(1, 0, ()), last], "p")


def test_counts_are_read_under_either_name() -> None:
    meta = {"completion_tokens": 4, "spec_verify_ct": 2}
    assert mark_of(meta | {"spec_correct_drafts_histogram": [1, 1]}) == Mark(4, 2, (1, 1))
    assert mark_of(meta | {"spec_accept_histogram": [1, 1]}) == Mark(4, 2, (1, 1))
    assert mark_of({"completion_tokens": 1}) == Mark(1, 0, ())


def test_states_of_a_prompt_in_chunks_are_laid_end_to_end() -> None:
    prompt, decoded = rows_of([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]], [7.0, 8.0], [9.0, 1.0]])
    assert prompt == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]] and decoded == [[7.0, 8.0], [9.0, 1.0]]
