from __future__ import annotations

import pytest

from stages.acceptance.stops import Ended, Stop, accepted_until, count_stops, stop_at_string, stop_at_token

#        prefill | 1 drafted, bonus | 3 drafted, bonus | bonus
IDS = (10, 11, 12, 13, 14, 15, 16, 17)
ACCEPTED = (1, 3, 0)


def test_the_stop_is_the_first_token_of_the_longest_accepted_draft() -> None:
    stop = stop_at_token("p", IDS, ACCEPTED)
    assert stop == Stop("p", token=13, ids=IDS[:4], inside_a_draft=True, accepted=ACCEPTED)


def test_a_token_said_before_would_end_the_answer_earlier_and_is_not_taken() -> None:
    stop = stop_at_token("p", (10, 11, 12, 10, 14, 15, 16, 17), ACCEPTED)
    assert stop is not None and (stop.token, stop.ids, stop.inside_a_draft) == (11, (10, 11), True)


def test_where_nothing_was_accepted_some_other_token_does() -> None:
    stop = stop_at_token("p", (10, 11, 12), (0, 0))
    assert stop is not None and (stop.token, stop.inside_a_draft) == (12, False)
    assert stop_at_token("p", (10,), ()) is None
    assert stop_at_token("p", (10, 10, 10), (1,)) is None


def test_a_string_is_taken_where_it_stands_first() -> None:
    stop = stop_at_string("p", "aaaa bbbb cccc", (1,))
    assert stop is not None and "aaaa bbbb cccc".find(stop.string) == len(stop.text) > 0
    assert stop_at_string("p", "", ()) is None and stop_at_string("p", "aaaaaaaa", ()) is None
    assert stop_at_string("p", "half a sign \ufffd", ()) is None


@pytest.mark.parametrize(
    ("tokens", "passes"), [(1, ()), (2, (1,)), (3, (1,)), (4, (1, 1)), (5, (1, 2)), (7, (1, 3)), (8, ACCEPTED)]
)
def test_what_was_accepted_behind_the_end_does_not_count(tokens: int, passes: tuple[int, ...]) -> None:
    assert accepted_until(ACCEPTED, tokens) == passes


def ended(tokens: int = 4, finish: str = "stop", accepted: tuple[int, ...] = (1, 1), text: str = "") -> Ended:
    return Ended(IDS[:tokens], text, finish, accepted)


@pytest.mark.parametrize(
    ("drafted", "right"),
    [
        (ended(), 1),
        (ended(5), 0),  # a token ran on behind the stop
        (ended(finish="length"), 0),
        (ended(accepted=(1, 3)), 0),  # what was accepted behind the end was counted
    ],
)
def test_answers_that_run_on_or_are_counted_wrong_are_named(drafted: Ended, right: int) -> None:
    stop = stop_at_token("p", IDS, ACCEPTED)
    assert stop is not None
    (found,) = count_stops([stop], [ended(accepted=(0, 0, 0))], [drafted])
    assert (found.condition, found.requests, found.plain_right, found.drafted_right) == ("token", 1, 1, right)
    assert found.inside_a_draft == 1 and found.differing_prompt_ids == (() if right else ("p",))


def test_a_string_is_cut_off_and_both_ways_say_the_same_tokens() -> None:
    stop = Stop("p", string="def ", text="abc", accepted=ACCEPTED)
    both = [ended(text="abc"), ended(5, text="abc", accepted=(1, 2)), ended(text="abcd")]
    found = [count_stops([stop], [both[0]], [one])[0].drafted_right for one in both]
    assert found == [1, 0, 0]
