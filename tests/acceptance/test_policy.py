from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.acceptance.mix import ratios_for, shares
from stages.acceptance.policy import choose_levels, choose_policy, speculation_off_above
from stages.contracts.errors import DataError
from stages.contracts.evidence import AcceptLength, Ratio
from stages.contracts.policy import ServingPolicy

PUBLISHED = json.loads((Path(__file__).parent / "published_sweeps.json").read_text())
# Published figures come without intervals. Repeats of one setting on a server differ by some hundredths; the tables' own
# wobble (1.32, 1.38, 1.34, 1.38 where nothing changes but the batch) says the same.
NOISE = 0.05


def ratio(concurrency: int, middle: float, half: float = NOISE, steps: int = 3) -> Ratio:
    return Ratio(
        arm="speculative",
        draft_steps=steps,
        concurrency=concurrency,
        ratio=middle,
        low=middle - half,
        high=middle + half,
    )


def policy(ratios: list[Ratio], **more: object) -> ServingPolicy:
    about = {"draft_digest": "sha256:0", "engine": "in_process", "engine_version": "1", "device": "cpu"}
    return choose_policy(ratios, **about, **more)  # type: ignore[arg-type]


def steps(chosen: ServingPolicy, *batches: int) -> list[int]:
    return [chosen.steps_for(batch) for batch in batches]


@pytest.mark.parametrize("sweep", PUBLISHED, ids=lambda s: s["name"])
def test_published_sweeps_give_the_decisions_of_a_careful_person(sweep: dict) -> None:
    measured = {int(batch): middle for batch, middle in sweep["ratios"].items()}
    chosen = policy([ratio(b, m, steps=sweep["draft_steps"]) for b, m in measured.items()])
    drafted = {b for first, last in sweep["drafted"] for b in range(first, last + 1)}
    for batch in range(1, 2 * max(measured)):
        assert chosen.steps_for(batch) == (sweep["draft_steps"] if batch in drafted else 0), f"batch {batch}"
        assert chosen.is_measured(batch) == (min(measured) <= batch <= max(measured))
    assert chosen.without_switching is not None
    told = chosen.without_switching
    assert (told.kind, told.max_batch) == (sweep["fixed"], sweep["fixed_up_to"])


def test_what_was_not_measured_is_said_and_is_not_a_zero_like_any_other() -> None:
    chosen = policy([ratio(2, 1.5), ratio(8, 0.8)])
    told = json.loads(chosen.canonical())
    assert (told["measured_from"], told["measured_up_to"], told["not_measured"]) == (2, 8, "plain")
    spans = [(s.first, s.last, s.draft_steps, s.level is not None) for s in chosen.spans()]
    assert spans == [(1, 1, 0, False), (2, 2, 3, True), (3, 8, 0, True), (9, None, 0, False)]


def test_a_gain_within_the_noise_is_no_gain() -> None:
    assert speculation_off_above(policy([ratio(1, 1.08, half=0.02), ratio(2, 1.08, half=0.09)])) == 1


def test_one_lucky_batch_does_not_switch_on_again_and_its_figure_is_kept() -> None:
    chosen = policy([ratio(1, 1.3), ratio(4, 0.9), ratio(8, 1.2)])
    assert [level.draft_steps for level in chosen.levels] == [3, 0, 0]
    assert chosen.levels[2].ratio == 1.2  # for a reader to wonder at
    assert steps(policy([ratio(1, 1.3), ratio(4, 0.9), ratio(8, 1.2), ratio(16, 0.9)]), 1, 4, 8, 16) == [3, 0, 0, 0]


def test_two_batches_in_a_row_switch_on_again_and_what_lies_between_off_and_on_stays_off() -> None:
    chosen = policy([ratio(1, 0.95), ratio(4, 1.2), ratio(16, 1.25), ratio(64, 0.9)])  # as mixtures of experts do
    assert steps(chosen, 1, 2, 3, 4, 8, 16, 17, 64) == [0, 0, 0, 3, 3, 3, 0, 0]
    assert speculation_off_above(chosen) == 16
    told = chosen.without_switching
    assert told is not None and told.kind == "plain" and "router sends by an upper bound" in told.words


def test_on_at_the_end_after_an_off_is_not_on_everywhere() -> None:
    assert speculation_off_above(policy([ratio(1, 0.9), ratio(2, 1.2), ratio(4, 1.2)])) == 4


def test_a_batch_between_two_measured_ones_goes_by_the_shorter_draft() -> None:
    falling = policy([ratio(1, 1.3, steps=2), ratio(4, 1.2, steps=1), ratio(16, 0.7, steps=1)])
    assert steps(falling, 1, 2, 4, 5, 16) == [2, 1, 1, 0, 0]
    rising = policy([ratio(1, 1.1, steps=1), ratio(4, 1.3, steps=3)])
    assert steps(rising, 1, 2, 3, 4) == [1, 1, 1, 3]


def test_the_best_lower_end_wins_and_the_shorter_of_a_tie() -> None:
    sweep = [ratio(1, 1.3, 0.2, steps=3), ratio(1, 1.25, 0.05, steps=2), ratio(1, 1.246, 0.05, steps=1)]
    assert choose_levels(sweep)[0].draft_steps == 1
    assert choose_levels([*sweep[:2], ratio(1, 1.2, 0.05, steps=1)])[0].draft_steps == 2


def test_a_tie_with_plain_decoding_is_not_won_by_a_length_that_is_not_proven() -> None:
    level = choose_levels([ratio(1, 1.054, 0.05, steps=3), ratio(1, 1.049, 0.05, steps=1)])[0]
    assert (level.draft_steps, level.low > 1) == (3, True)


def test_a_length_that_was_not_measured_at_a_batch_is_not_used_there() -> None:
    chosen = policy([ratio(1, 1.5, steps=3), ratio(1, 1.2, steps=1), ratio(4, 1.1, steps=1)])
    assert steps(chosen, 1, 2, 4) == [3, 1, 1]


def test_never_on_is_zero_and_a_sweep_that_says_nothing_or_two_things_is_an_error() -> None:
    never = policy([ratio(1, 0.9), ratio(2, 0.8)])
    assert speculation_off_above(never) == 0
    assert never.without_switching is not None and "pays at no load" in never.without_switching.words
    with pytest.raises(DataError, match="Nothing was measured"):
        choose_levels([])
    with pytest.raises(DataError, match="concurrency 2, 3 draft steps, 2 times"):
        choose_levels([ratio(1, 1.2), ratio(2, 1.2), ratio(2, 1.1)])
    with pytest.raises(DataError, match="Plain decoding is what ratios are over"):
        choose_levels([ratio(1, 1.0, steps=0)])


def test_without_switching_the_router_s_bound_is_where_that_length_still_pays() -> None:
    sweep = [ratio(1, 1.6, steps=3), ratio(2, 1.3, steps=3), ratio(4, 0.8, steps=3)]
    told = policy([*sweep, *(ratio(c, 1.1, steps=1) for c in (1, 2, 4)), ratio(8, 0.7, steps=1)]).without_switching
    assert told is not None and (told.kind, told.draft_steps, told.max_batch) == ("router", 3, 2)
    assert "at most 2 requests at once" in told.words


def length(*by_position: float, half: float = 0.0) -> AcceptLength:
    middle = 1 + sum(by_position)
    return AcceptLength(
        requests=9, tokens=90, verifications=50, accept_length=middle, low=middle - half, high=middle + half,
        by_position=by_position,
    )  # fmt: skip


def test_another_mix_is_read_from_accept_lengths_and_never_from_other_cells() -> None:
    lengths = {"coding": length(0.8, 0.6), "chat": length(0.2, 0.0)}
    half = {"coding": 0.5, "chat": 0.5}
    sweep = [ratio(1, 1.2, 0.0, steps=2), ratio(1, 1.1, 0.0, steps=1), ratio(1, 1.0, 0.0, steps=3)]
    same = ratios_for(sweep, lengths, half, half)
    assert [(r.draft_steps, r.ratio) for r in same] == [(2, pytest.approx(1.2)), (1, pytest.approx(1.1))]
    coding = ratios_for(sweep, lengths, half, {"coding": 1.0})
    mixed = 2 / (1 / 2.4 + 1 / 1.2)  # tokens a verification of equal shares of the tokens
    assert coding[0].ratio == pytest.approx(1.2 * 2.4 / mixed)
    assert (coding[0].low, coding[0].high) == (pytest.approx(coding[0].ratio), pytest.approx(coding[0].ratio))
    with pytest.raises(DataError, match="no accept length") as error:
        ratios_for(sweep, lengths, half, {"poetry": 1.0})
    assert "poetry" in str(error.value)


def test_what_a_domain_s_accept_length_leaves_open_widens_its_interval() -> None:
    lengths = {"coding": length(0.8, 0.6, half=0.2), "chat": length(0.2, 0.1, half=0.02)}
    (r,) = ratios_for([ratio(1, 1.2, 0.06, steps=2)], lengths, {"coding": 1.0}, {"coding": 1.0})
    assert r.ratio == pytest.approx(1.2)
    assert r.low < 1.2 * 2.2 / 2.4 < 1.14 < 1.26 < r.high
    assert r.low > 1.14 * 2.2 / 2.4  # two independent errors are seldom both at their ends


def test_the_policy_says_what_each_domain_alone_would_be_served_with() -> None:
    lengths = {"coding": length(0.8, half=0.02), "chat": length(0.2, half=0.02)}
    chosen = policy(
        [ratio(1, 1.3, 0.02, steps=1), ratio(8, 1.1, 0.02, steps=1)], shares=shares(["coding", "chat"]), lengths=lengths
    )
    assert chosen.shares == {"coding": 0.5, "chat": 0.5}
    assert [level.draft_steps for level in chosen.by_domain["coding"]] == [1, 1]
    assert [level.draft_steps for level in chosen.by_domain["chat"]] == [1, 0]
