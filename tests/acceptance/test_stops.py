from __future__ import annotations

import pytest

from stages.acceptance.stops import Stop, count_stops, stop_at_string, stop_at_token

#        prefill | 1 drafted, bonus | 3 drafted, bonus | bonus
IDS = (10, 11, 12, 13, 14, 15, 16, 17)
ACCEPTED = (1, 3, 0)


def test_the_stop_is_the_first_token_of_the_longest_accepted_draft() -> None:
    stop = stop_at_token("p", IDS, ACCEPTED)
    assert stop == Stop("p", token=13, ids=IDS[:4], inside_a_draft=True)


def test_a_token_said_before_would_end_the_answer_earlier_and_is_not_taken() -> None:
    stop = stop_at_token("p", (10, 11, 12, 10, 14, 15, 16, 17), ACCEPTED)
    assert stop is not None and (stop.token, stop.ids, stop.inside_a_draft) == (11, (10, 11), True)


def test_where_nothing_was_accepted_some_other_token_does() -> None:
    stop = stop_at_token("p", (10, 11, 12), (0, 0))
    assert stop is not None and (stop.token, stop.inside_a_draft) == (12, False)
    assert stop_at_token("p", (10,), ()) is None
    assert stop_at_token("p", (10, 10, 10), (1,)) is None


def test_a_string_is_taken_where_it_stands_first() -> None:
    stop = stop_at_string("p", "aaaa bbbb cccc")
    assert stop is not None and "aaaa bbbb cccc".find(stop.string) == len(stop.text) > 0
    assert stop_at_string("p", "") is None and stop_at_string("p", "aaaaaaaa") is None
    assert stop_at_string("p", "half a sign \ufffd") is None


@pytest.mark.parametrize(
    ("drafted", "right"),
    [
        ((IDS[:4], "", "stop"), 1),
        ((IDS[:5], "", "stop"), 0),  # a token ran on behind the stop
        ((IDS[:4], "", "length"), 0),
    ],
)
def test_answers_that_run_on_are_counted_and_named(drafted: tuple[tuple[int, ...], str, str], right: int) -> None:
    stop = stop_at_token("p", IDS, ACCEPTED)
    assert stop is not None
    (found,) = count_stops([stop], [(IDS[:4], "", "stop")], [drafted])
    assert (found.condition, found.requests, found.plain_right, found.drafted_right) == ("token", 1, 1, right)
    assert found.inside_a_draft == 1 and found.differing_prompt_ids == (() if right else ("p",))


def test_a_string_is_cut_off_and_both_ways_say_the_same_tokens() -> None:
    stop = Stop("p", string="def ", text="abc")
    both = [(IDS[:4], "abc", "stop"), (IDS[:5], "abc", "stop"), (IDS[:4], "abcd", "stop")]
    found = [count_stops([stop], [both[0]], [one])[0].drafted_right for one in both]
    assert found == [1, 0, 0]
