from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from stages import engines
from stages.contracts.errors import EngineError
from stages.drafts._decode import DraftDecoder
from stages.engines.in_process import InProcess, Request, served_points
from stages.targets import load_target
from stages.targets._decoder import Decoder
from tests import tiny
from tests.engines.parts import Knowing, random_checkpoint, random_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_target(tiny.make_target(tmp_path_factory.mktemp("target")))


def ragged(count: int, seed: int = 0, **changes: object) -> list[Request]:
    r = random.Random(seed)
    return [
        Request(f"p{i}", tuple(r.randrange(3, 250) for _ in range(r.randrange(1, 24))), r.randrange(1, 24), **changes)  # type: ignore[arg-type]
        for i in range(count)
    ]


def plainly(target: Decoder, request: Request) -> tuple[int, ...]:
    """Greedy decoding with no cache and no batch."""
    ids = list(request.prompt_ids)
    for _ in range(request.max_new_tokens):
        last = target.packed(torch.tensor(ids), [len(ids)]).last[-1:]
        ids.append(int(target.logits(last).argmax(-1)))
        if ids[-1] in target.config.eos_ids and not request.ignore_eos:
            break
    return tuple(ids[len(request.prompt_ids) :])


def with_eos(target: Decoder, *eos_ids: int) -> Decoder:
    """The same target with other end-of-turn tokens: ones that it really says."""
    other = object.__new__(Decoder)
    other.__dict__ = {**target.__dict__, "config": dataclasses.replace(target.config, eos_ids=eos_ids)}
    return other


def test_batched_greedy_equals_decoding_one_by_one_without_a_cache(target: Decoder) -> None:
    requests = ragged(9)
    engine = InProcess(target, slots=4, positions=64)
    for concurrency in (1, 3, 4):
        answers = engine.generate(requests, concurrency=concurrency)
        assert [a.ids for a in answers] == [plainly(target, r) for r in requests]
        assert [a.prompt_id for a in answers] == [r.prompt_id for r in requests]


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_drafted_chain_leaves_greedy_output_as_it_is(target: Decoder, steps: int, batch: int) -> None:
    requests = ragged(2 * batch + 1, seed=steps)
    engine = InProcess(target, random_draft(target), slots=5, positions=64)
    plain = engine.generate(requests, concurrency=batch)
    drafted = engine.generate(requests, concurrency=batch, draft_steps=steps)
    assert [a.ids for a in drafted] == [a.ids for a in plain]
    assert [a.finish for a in drafted] == [a.finish for a in plain]


def test_the_chain_stays_lossless_when_half_of_the_proposals_are_right(target: Decoder) -> None:
    requests = ragged(11, seed=5)
    plain = InProcess(target, slots=4, positions=64).generate(requests, concurrency=4)
    texts = [[*r.prompt_ids, *a.ids] for r, a in zip(requests, plain, strict=True)]
    for wrong in (2, 3):
        engine = InProcess(target, Knowing(texts, target.config.vocab_size, wrong=wrong), slots=4, positions=64)
        drafted = engine.generate(requests, concurrency=4, draft_steps=3)
        assert [a.ids for a in drafted] == [a.ids for a in plain]
        kept = sum(sum(a.accepted) for a in drafted)
        assert 0 < kept < 3 * sum(len(a.accepted) for a in drafted)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_draft_that_knows_the_answer_needs_the_fewest_verifications(target: Decoder, steps: int) -> None:
    requests = ragged(7, seed=6)
    plain = InProcess(target, slots=3, positions=64).generate(requests, concurrency=3)
    texts = [[*r.prompt_ids, *a.ids] for r, a in zip(requests, plain, strict=True)]
    engine = InProcess(target, Knowing(texts, target.config.vocab_size), slots=3, positions=64)
    for answer, before in zip(engine.generate(requests, concurrency=3, draft_steps=steps), plain, strict=True):
        assert answer.ids == before.ids
        rest = len(answer.ids) - 1  # the first token comes from the prompt's own pass
        assert len(answer.accepted) == -(-rest // (steps + 1))
        assert sum(answer.accepted) == rest - rest // (steps + 1)  # tokens past the end are not counted


def test_an_end_of_turn_inside_the_draft_ends_the_answer_there(target: Decoder) -> None:
    request = Request("p", tuple(range(5, 25)), 20)
    full = plainly(target, request)
    place = next(i for i in range(4, 20) if full.index(full[i]) == i)
    stopping = with_eos(target, full[place])
    texts = [[*request.prompt_ids, *full]]
    engine = InProcess(stopping, Knowing(texts, target.config.vocab_size), slots=1, positions=64)
    for steps in (1, 2, 3, 4):
        (answer,) = engine.generate([request], concurrency=1, draft_steps=steps)
        assert (answer.ids, answer.finish) == (full[: place + 1], "stop")
        assert sum(answer.accepted) == place - place // (steps + 1)
    (answer,) = engine.generate([dataclasses.replace(request, ignore_eos=True)], concurrency=1, draft_steps=3)
    assert (answer.ids, answer.finish) == (full, "length")


def test_switching_by_batch_size_in_the_middle_of_answers_is_lossless(target: Decoder) -> None:
    requests = ragged(12, seed=8)
    engine = InProcess(target, random_draft(target), slots=4, positions=64)
    plain = engine.generate(requests, concurrency=4)
    for policy in ({1: 3, 2: 0, 3: 2, 4: 0}, {1: 0, 2: 1, 3: 0, 4: 4}):
        assert [a.ids for a in engine.generate(requests, concurrency=4, draft_steps=policy.__getitem__)] == [
            a.ids for a in plain
        ]


def test_a_draft_that_catches_up_late_proposes_what_it_would_have_proposed(target: Decoder) -> None:
    """Off for the first rounds, then on: the states kept meanwhile reach the draft in one pass."""
    request = Request("p", tuple(range(5, 25)), 24, ignore_eos=True)
    plain = InProcess(target, slots=1, positions=64).generate([request], concurrency=1)[0]
    texts = [[*request.prompt_ids, *plain.ids]]
    rounds = iter([3] + [0] * 5 + [3] * 99)  # the first answer tells the engine what to prepare for
    engine = InProcess(target, Knowing(texts, target.config.vocab_size), slots=1, positions=64)
    (answer,) = engine.generate([request], concurrency=1, draft_steps=lambda batch: next(rounds))
    assert answer.ids == plain.ids
    assert answer.accepted[:5] == (0,) * 5 and set(answer.accepted[6:-1]) == {3}


def test_off_means_that_the_draft_is_never_called_and_no_state_is_kept(target: Decoder) -> None:
    draft = Knowing([], target.config.vocab_size)
    engine = InProcess(target, draft, slots=4, positions=64)
    engine.generate(ragged(9), concurrency=4, draft_steps=0)
    engine.generate(ragged(9), concurrency=4, draft_steps=lambda batch: 0)
    assert draft.calls == 0
    assert engine._aux is None


def test_what_the_observer_sees_is_the_target_s_state_at_the_points_fed(target: Decoder) -> None:
    requests = ragged(5, seed=2)
    engine = InProcess(target, random_draft(target, points=(0, 1, 3)), slots=3, positions=64)
    fed: dict[str, list[tuple[int, torch.Tensor]]] = {}
    answers = engine.generate(
        requests,
        concurrency=3,
        draft_steps=2,
        observe=lambda prompt_id, first, aux: fed.setdefault(prompt_id, []).append((first, aux)),
    )
    seen = 0
    for request, answer in zip(requests, answers, strict=True):
        at = 0
        for first, aux in fed.get(request.prompt_id, []):
            assert first == at  # no position twice, none left out
            at += len(aux)
        if at:
            text = torch.tensor([*request.prompt_ids, *answer.ids])
            expected = target.packed(text, [len(text)], (0, 1, 3)).aux((0, 1, 3))[:at]
            torch.testing.assert_close(
                torch.cat([a for _, a in fed[request.prompt_id]]), expected, rtol=1e-4, atol=1e-4
            )
            seen += 1
    assert seen >= 3


def test_equal_seeds_give_equal_samples_whatever_the_batch(target: Decoder) -> None:
    requests = [Request(f"p{i}", tuple(range(4, 9 + i)), 12, temperature=0.9, seed=i) for i in range(6)]
    for draft, steps in ((None, 0), (random_draft(target), 3)):
        engine = InProcess(target, draft, slots=6, positions=64)
        alone = engine.generate(requests, concurrency=1, draft_steps=steps)
        assert [a.ids for a in engine.generate(requests, concurrency=6, draft_steps=steps)] == [a.ids for a in alone]
        assert len({a.ids for a in alone}) > 1


def test_greedy_and_sampled_requests_share_a_batch(target: Decoder) -> None:
    greedy = ragged(3, seed=4)
    sampled = [dataclasses.replace(r, prompt_id="s" + r.prompt_id, temperature=1.0) for r in greedy]
    engine = InProcess(target, random_draft(target), slots=6, positions=64)
    answers = engine.generate([*greedy, *sampled], concurrency=6, draft_steps=2)
    assert [a.ids for a in answers[:3]] == [plainly(target, r) for r in greedy]


def test_answers_are_told_as_they_end(target: Decoder) -> None:
    told: list[str] = []
    requests = ragged(6)
    answers = InProcess(target, slots=2, positions=64).generate(
        requests, concurrency=2, on_answer=lambda a: told.append(a.prompt_id)
    )
    assert sorted(told) == sorted(r.prompt_id for r in requests)
    assert all(0 < a.first_token_ms <= a.latency_ms for a in answers)


def test_what_does_not_fit_is_refused_with_the_number_that_would(target: Decoder) -> None:
    engine = InProcess(target, slots=2, positions=16)
    with pytest.raises(EngineError, match="prompt long") as error:
        engine.generate([Request("long", tuple(range(10)), 7)], concurrency=1)
    assert "within 16 tokens" in str(error.value)
    with pytest.raises(EngineError, match="1 to 2"):
        engine.generate([], concurrency=3)
    with pytest.raises(EngineError, match="Drafting without a draft"):
        engine.generate([Request("p", (5,), 2)], concurrency=1, draft_steps=1)


def test_engine_ids_mean_points_as_in_sglang() -> None:
    assert served_points((2, 15, 27), 30) == (3, 16, 28)
    assert served_points((-1, 2, 15), 30) == (0, 3, 16)  # the fault seen in the field: the embedding put first
    assert served_points((27, 2, 15), 30) == (3, 16, 28)
    assert served_points((), 30) == (2, 15, 27)
    with pytest.raises(EngineError, match="point = id"):
        served_points((2, 15, 29), 30)


def test_doubled_ids_are_refused_by_the_draft_s_width(target: Decoder) -> None:
    points = served_points((1, 2, 2), tiny.LAYERS)
    assert points == (2, 3)
    with pytest.raises(EngineError, match="other states than the engine feeds"):
        DraftDecoder(random_checkpoint(target), points=points, embedding=target.embedding)


def test_an_unknown_engine_is_named_beside_those_there_are(tmp_path: Path) -> None:
    assert "in_process" in engines.names()
    assert engines.load("in_process").NAME == "in_process"
    with pytest.raises(EngineError, match="in_process"):
        engines.load("warp_drive")


def test_equal_prompts_are_run_once_and_answered_each(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [*ragged(3, seed=9), *ragged(3, seed=9)]
    expected = [plainly(target, r) for r in requests]
    tokens: list[int] = []
    packed = target.packed
    monkeypatch.setattr(target, "packed", lambda ids, *rest: (tokens.append(len(ids)), packed(ids, *rest))[1])
    for draft, steps in ((None, 0), (random_draft(target), 2)):
        engine = InProcess(target, draft, slots=6, positions=64)
        assert [a.ids for a in engine.generate(requests, concurrency=6, draft_steps=steps)] == expected
    assert tokens == [sum(len(r.prompt_ids) for r in requests[:3])] * 2
