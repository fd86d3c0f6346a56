"""An engine that follows a policy: hysteresis, and answers that do not change when the draft length does."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from benchmarks.stepped_load import STAIRS, Off, climb, starts
from stages.acceptance.follow import Follower
from stages.contracts.policy import Hysteresis, PolicyLevel, ServingPolicy
from stages.engines.in_process import InProcess, Request
from stages.targets import load_target
from stages.targets._decoder import Decoder
from tests import tiny
from tests.engines.parts import Knowing, random_draft


def policy(levels: dict[int, int], up_to: int = 16, measured_from: int = 1, **hysteresis: int) -> ServingPolicy:
    return ServingPolicy(
        draft_digest="sha256:0",
        engine="in_process",
        engine_version="1",
        device="cpu",
        levels=tuple(PolicyLevel(min_batch=b, draft_steps=k, ratio=1, low=1, high=1) for b, k in levels.items()),
        measured_from=measured_from,
        measured_up_to=up_to,
        hysteresis=Hysteresis(**hysteresis),
    )


def served(follower: Follower, batches: list[int]) -> list[int]:
    return [follower(batch) for batch in batches]


def test_a_load_that_flutters_does_not_flap() -> None:
    flutter = [4, 5] * 50
    follower = Follower(policy({1: 3, 5: 0}, hold_steps=4))
    assert set(served(follower, flutter)) == {3} and follower.switches == []
    at_once = Follower(policy({1: 3, 5: 0}, hold_steps=1))
    assert served(at_once, flutter) == [3, 0] * 50 and len(at_once.switches) == 99


def test_a_load_that_lasts_is_followed_after_so_many_steps_both_ways() -> None:
    follower = Follower(policy({1: 3, 5: 0}, hold_steps=4))
    assert served(follower, [2] * 3 + [8] * 6 + [2] * 6) == [3] * 3 + [3] * 3 + [0] * 3 + [0] * 3 + [3] * 3
    assert [(s.step, s.batch, s.before, s.after) for s in follower.switches] == [(6, 8, 3, 0), (12, 2, 0, 3)]


def test_random_flutter_switches_at_most_once_in_so_many_steps() -> None:
    noise = random.Random(0)
    for hold in (2, 4, 8):
        follower = Follower(policy({1: 3, 4: 1, 8: 0}, hold_steps=hold))
        served(follower, [noise.choice((3, 4, 7, 8)) for _ in range(2000)])
        gaps = [b.step - a.step for a, b in pairwise(follower.switches)]
        assert all(gap >= hold for gap in gaps)


def test_within_a_band_the_load_may_stay_for_ever() -> None:
    follower = Follower(policy({1: 3, 9: 0}, hold_steps=2, band=1))
    assert set(served(follower, [8, 9, 9, 9, 9, 9, 8])) == {3}
    assert served(follower, [10] * 3) == [3, 0, 0]
    assert set(served(follower, [9, 8, 8, 8, 8])) == {0}
    assert served(follower, [7] * 3) == [0, 3, 3]


def test_a_batch_that_was_not_measured_is_plain_at_once_whatever_the_hysteresis() -> None:
    follower = Follower(policy({2: 3}, up_to=4, measured_from=2, hold_steps=50, band=8))
    assert served(follower, [3, 4, 5, 6]) == [3, 3, 0, 0]
    back = Follower(policy({2: 3}, up_to=4, measured_from=2, hold_steps=3))
    assert served(back, [3, 1, 2, 2, 2, 2]) == [3, 0, 0, 0, 3, 3]


def test_a_follower_says_what_it_may_ask_for_without_being_asked_for_a_step() -> None:
    follower = Follower(policy({1: 2, 3: 3, 5: 0}))
    assert [follower.most(c) for c in (1, 2, 3, 16)] == [2, 2, 3, 3]
    assert follower(4) == 3 and follower.most(1) == 3  # still served with 3 while it waits
    assert Follower(policy({1: 0})).most(16) == 0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_target(tiny.make_target(tmp_path_factory.mktemp("target")))


def requests(count: int, tokens: int) -> list[Request]:
    r = random.Random(1)
    return [
        Request(f"p{i}", tuple(r.randrange(3, 250) for _ in range(r.randrange(1, 20))), tokens, ignore_eos=True)
        for i in range(count)
    ]


def test_a_load_up_and_down_the_stairs_is_answered_as_plain_decoding_would(target: Decoder) -> None:
    stairs = (1, 2, 4, 2, 1)
    asked = requests(54, 10)
    plain = InProcess(target, slots=4, positions=40).generate(asked, concurrency=4)
    answers, trace = climb(InProcess(target, slots=4, positions=40), asked, 0, stairs)
    assert trace.switches() == 0 and {p.level for p in trace.passes if p.batch} >= set(range(5))
    assert sum(p.tokens for p in trace.passes) == 10 * len(answers) and len(answers) < len(asked)
    assert len(trace.speeds()) == len(stairs) and min(trace.speeds()) > 0
    texts = [[*r.prompt_ids, *a.ids] for r, a in zip(asked, plain, strict=True)]
    for draft in (random_draft(target), Knowing(texts, target.config.vocab_size, wrong=3)):
        engine = InProcess(target, draft, slots=4, positions=40)
        follower = Follower(policy({1: 3, 2: 1, 3: 0}, up_to=4, hold_steps=2))
        answers, trace = climb(engine, asked, follower, stairs)
        assert len(answers) > 16 and [a.ids for a in answers] == [a.ids for a in plain[: len(answers)]]
        assert trace.switches() == len(follower.switches) >= 4
        steps = [p.draft_steps for p in trace.passes if p.batch]
        assert (steps[0], steps[-1]) == (3, 3) and 0 in steps and 1 in steps


@pytest.mark.parametrize("steps", [0, 3])
def test_every_level_of_the_benchmark_s_stairs_is_served_at_its_own_batch_and_all_requests_are(
    target: Decoder, steps: int
) -> None:
    asked = requests(sum(starts(STAIRS)) + 3, 6)
    engine = InProcess(target, random_draft(target), slots=max(STAIRS), positions=40)
    answers, trace = climb(engine, asked, steps)
    assert len(trace.speeds()) == len(STAIRS) and min(trace.speeds()) > 0
    assert len(answers) == sum(starts(STAIRS)), "every arm serves the same requests"
    assert max(p.batch for p in trace.passes) == max(STAIRS)


def test_switched_on_again_the_draft_has_seen_all_it_missed(target: Decoder) -> None:
    """One that knows every text proposes from what it was fed: a position left out would spoil what follows."""
    stairs = (1, 4, 1)
    asked = requests(22, 16)
    plain = InProcess(target, slots=4, positions=40).generate(asked, concurrency=4)
    texts = [[*r.prompt_ids, *a.ids] for r, a in zip(asked, plain, strict=True)]
    engine = InProcess(target, Knowing(texts, target.config.vocab_size), slots=4, positions=40)
    answers, trace = climb(engine, asked, Follower(policy({1: 3, 2: 0}, up_to=4, hold_steps=2)), stairs)
    assert [a.ids for a in answers] == [a.ids for a in plain[: len(answers)]]
    again = [p for p in trace.passes if p.level == 2 and p.draft_steps and p.batch == 1]
    assert again and all(p.tokens == 4 for p in again[:2])


def test_greedy_answers_stay_as_they_are_beside_sampled_ones_when_the_draft_length_changes(target: Decoder) -> None:
    """Greedy and sampled requests share a batch whose draft length changes: the greedy ones stay as they are."""
    greedy = requests(12, 12)
    drawn = [Request(f"s{i}", r.prompt_ids, 12, temperature=0.9, seed=i, ignore_eos=True) for i, r in enumerate(greedy)]
    plain = {a.prompt_id: a.ids for a in InProcess(target, slots=4, positions=40).generate(greedy, concurrency=4)}
    engine = InProcess(target, random_draft(target), slots=4, positions=40)
    mixed = [x for pair in zip(greedy, drawn, strict=True) for x in pair]
    answers, trace = climb(engine, mixed, Follower(policy({1: 2, 3: 0}, up_to=4, hold_steps=2)), (1, 4, 1))
    stayed = [a.ids == plain[a.prompt_id] for a in answers if a.prompt_id in plain]
    assert all(stayed) and len(stayed) > 5
    assert trace.switches() >= 2


def test_off_keeps_the_states_and_never_asks_the_draft(target: Decoder) -> None:
    draft = Knowing([], target.config.vocab_size)
    engine = InProcess(target, draft, slots=4, positions=40)
    answers, _ = climb(engine, requests(22, 8), Off(), (1, 4, 1))
    assert draft.calls == 0 and engine._aux is not None
    plain = InProcess(target, slots=4, positions=40).generate(requests(22, 8), concurrency=4)
    assert answers and [a.ids for a in answers] == [a.ids for a in plain[: len(answers)]]
