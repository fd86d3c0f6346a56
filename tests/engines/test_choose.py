from __future__ import annotations

import pytest
import torch
from scipy import stats

from stages.engines._choose import distribution, draw, verify_sampled
from stages.engines.in_process import InProcess, Request
from stages.targets import load_target
from tests import tiny
from tests.engines.parts import random_draft

DRAWS = 40_000


def refuted(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Chi-square against an exact distribution at p < 1e-4; cells expected below 8 are pooled."""
    order = expected.argsort()
    counts, expected = counts.double()[order], expected.double()[order] * counts.sum()
    pooled = int((expected.cumsum(0) < 8).sum()) + 1
    counts = torch.cat([counts[:pooled].sum()[None], counts[pooled:]])
    expected = torch.cat([expected[:pooled].sum()[None], expected[pooled:]])
    return stats.chisquare(counts.numpy(), expected.numpy() * float(counts.sum() / expected.sum())).pvalue < 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_verified_chain_follows_the_target_s_distribution_exactly(temperature: float) -> None:
    """Vocabulary of 6, a draft of 4 of them, chain of 2: the first two tokens emitted are distributed as if drawn plainly."""
    g = torch.Generator().manual_seed(1)
    V, target_ids = 6, torch.tensor([0, 2, 3, 5])
    warm = torch.tensor([temperature])
    p1 = distribution(torch.randn(1, V, generator=g) * 2, warm)[0]
    after = distribution(torch.randn(V, V, generator=g) * 2, warm.expand(V))
    q1 = distribution(torch.randn(1, 4, generator=g) * 2, warm)[0]
    q_after = distribution(torch.randn(4, 4, generator=g) * 2, warm.expand(4))
    u = torch.rand(DRAWS, 5, generator=g, dtype=torch.float64)
    first = draw(q1.expand(DRAWS, -1), u[:, 0])
    q = torch.stack([q1.expand(DRAWS, -1), q_after[first]], 1)
    index = torch.stack([first, draw(q[:, 1], u[:, 1])], 1)
    drafted = target_ids[index]
    p = torch.stack([p1.expand(DRAWS, -1), after[drafted[:, 0]], torch.full((DRAWS, V), 1 / V)], 1)
    emitted, accepted = verify_sampled(p, drafted, index, q, target_ids, u[:, 2:])
    assert {0, 1, 2} == set(accepted.tolist())
    assert not refuted(emitted[:, 0].bincount(minlength=V), p1)
    second = emitted[accepted >= 1]
    for x in range(V):
        chosen = second[second[:, 0] == x]
        if len(chosen) > 500:
            assert not refuted(chosen[:, 1].bincount(minlength=V), after[x])
    assert refuted(drafted[:, 0].bincount(minlength=V), p1)  # the draft alone would be seen through


def test_served_samples_follow_the_exact_distribution_of_two_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    target = load_target(tiny.make_target(tmp_path_factory.mktemp("target")))
    prompt, V, temperature = tuple(range(7, 19)), target.config.vocab_size, 0.4
    draws = 1500
    requests = [Request(str(i), prompt, 3, temperature=temperature, seed=i, ignore_eos=True) for i in range(draws)]
    warm = torch.tensor([temperature])
    logits = target.logits(target.packed(torch.tensor(prompt), [len(prompt)]).last[-1:])
    first = distribution(logits, warm)[0]
    texts = torch.tensor([[*prompt, x] for x in range(V)])
    ends = target.packed(texts.reshape(-1), [len(prompt) + 1] * V).last.view(V, -1, tiny.HIDDEN)[:, -1]
    second = first @ distribution(target.logits(ends), warm.expand(V))
    engine = InProcess(target, random_draft(target), slots=250, positions=24)
    answers = engine.generate(requests, concurrency=250, draft_steps=1)
    ids = torch.tensor([a.ids for a in answers])
    assert not refuted(ids[:, 0].bincount(minlength=V), first)
    assert not refuted(ids[:, 1].bincount(minlength=V), second)
    assert refuted(ids[:, 1].bincount(minlength=V), first)


def test_draws_never_land_on_a_token_without_weight() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3, dtype=torch.float64)
    assert draw(weights, torch.tensor([0.0, 0.5, 1.0 - 1e-17], dtype=torch.float64)).tolist() == [1, 3, 3]


def test_temperature_zero_is_the_argmax_alone() -> None:
    p = distribution(torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]]), torch.tensor([0.0, 1.0]))
    assert p[0].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(p[1], torch.softmax(torch.tensor([1.0, 3.0, 2.0]).double(), -1))
