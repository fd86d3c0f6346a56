"""The replay against a server written out in full, and its ends by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from stages.acceptance.lengths import Answer
from stages.acceptance.simulate import answer_of, replay


def test_a_walk_by_hand() -> None:
    answer = [5, 6, 7, 8, 9, 2]
    drafted = [[6, 7, 0], [0, 0, 0], [0, 0, 0], [9, 2, 4], [2, 1, 1]]
    # prefill 5; root 0 keeps 6 7 and the bonus is 8; root 3 keeps 9 2, and the answer has ended
    assert replay(answer, drafted) == Answer(6, (2, 2))


def test_an_end_of_turn_inside_a_draft_ends_the_answer_and_nothing_behind_it_counts() -> None:
    assert replay([5, 2], [[2, 7, 7]]) == Answer(2, (1,))


def test_an_answer_of_one_token_needs_no_verification() -> None:
    assert replay([2], []) == Answer(1, ())
    assert replay([5, 6, 7], [[6, 7], [7, 7]], max_new_tokens=1) == Answer(1, ())
    assert replay([], []) == Answer(0, ())


@pytest.mark.parametrize(("limit", "expected"), [(2, (1,)), (3, (2,)), (4, (3,)), (5, (3,)), (6, (3, 1))])
def test_the_cap_cuts_what_was_accepted(limit: int, expected: tuple[int, ...]) -> None:
    answer = [1, 2, 3, 4, 5, 6, 7]
    perfect = [[j + 2, j + 3, j + 4] for j in range(7)]
    assert replay(answer, perfect, limit) == Answer(limit, expected)


def test_a_perfect_draft_reaches_the_ceiling_and_a_useless_one_the_floor() -> None:
    answer = list(range(1, 42))
    perfect = [[j + 2, j + 3, j + 4] for j in range(41)]
    assert replay(answer, perfect) == Answer(41, (3,) * 10)
    assert replay(answer, [[0, 0, 0]] * 41) == Answer(41, (0,) * 40)


def serve(
    answer: list[int], draft: Callable[[int, list[int]], int], steps: int, limit: int
) -> tuple[list[int], list[int]]:
    """A server that drafts from its own output: draft, verify, emit, stop at the end or at the limit."""
    out, accepted = answer[:1], []
    while len(out) < limit and len(out) < len(answer):
        proposal: list[int] = []
        for _ in range(steps):
            proposal.append(draft(len(out), out + proposal))
        target = answer[len(out) : len(out) + steps + 1]
        kept = 0
        while kept < min(steps, len(target)) and proposal[kept] == target[kept]:
            kept += 1
        emitted = target[: kept + 1][: limit - len(out)]
        accepted.append(min(kept, len(emitted)))
        out = out + emitted
    return out, accepted


@pytest.mark.parametrize("seed", range(20))
def test_the_replay_counts_as_a_server_that_drafts_from_its_own_output(seed: int) -> None:
    rng = random.Random(seed)
    answer = [rng.randrange(3, 6) for _ in range(rng.randrange(1, 30))]
    steps, limit = rng.randrange(1, 5), rng.randrange(1, 35)

    def draft(root: int, prefix: list[int]) -> int:
        """A draft that depends on its root and on every token fed, right about two times in three."""
        noise = random.Random(f"{seed} {root} {prefix}")
        right = prefix == answer[: len(prefix)] and len(prefix) < len(answer) and noise.random() < 0.7
        return answer[len(prefix)] if right else noise.randrange(3, 6)

    drafted = [[draft(j + 1, answer[: j + 1 + i]) for i in range(steps)] for j in range(len(answer))]
    out, accepted = serve(answer, draft, steps, limit)
    assert replay(answer, drafted, limit) == Answer(len(out), tuple(accepted))


def test_the_answer_is_the_first_supervised_run() -> None:
    assert answer_of([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], 2) == [3, 4]
    assert answer_of([1, 2], [0, 0], 2) == []
