"""The losses against their definitions in float64, with their gradients; pieces; low-precision products."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.drafts import _loss
from stages.drafts._loss import Loss, Queries, Teacher, head_loss
from tests.drafts.reference import CONFIG, make_teacher


def asked_of(teacher: Teacher, steps: list[list[int]], seed: int = 0) -> Queries:
    """Queries of several steps, each a list of positions; a few labels outside the draft vocabulary."""
    at = torch.tensor([p for step in steps for p in step])
    edges = torch.tensor([0, *(len(s) for s in steps)]).cumsum(0).tolist()
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(-1, len(teacher.head), (len(at),), generator=generator)
    scale = torch.rand(len(at), generator=generator, dtype=torch.float64) * (label >= 0)
    return Queries(tuple(slice(a, b) for a, b in itertools.pairwise(edges)), at, label, scale)


def one(kind: Loss, p: Tensor, z: Tensor, label: int) -> Tensor:
    """The loss of one query by its definition."""
    q = z.softmax(0)
    kl = (p * (p.log() - q.log())).sum()
    if kind == "kl":
        return kl
    if kind == "ce":
        return -q[label].log()
    rate = torch.stack([torch.minimum(a, b) for a, b in zip(p, q, strict=True)]).sum()
    weight = (-3 * rate).exp().detach()
    return weight * kl + (1 - weight) * (1 - rate)


def by_definition(
    kind: Loss, x: Tensor, head: Tensor, last: Tensor, teacher: Teacher, asked: Queries
) -> tuple[Tensor, list[int]]:
    total, best = torch.zeros((), dtype=torch.float64), []
    for n, (s, label) in enumerate(zip(asked.at.tolist(), asked.label.tolist(), strict=True)):
        normed = last[s] / (last[s].pow(2).mean() + teacher.eps).sqrt() * teacher.norm
        z = head @ x[n]
        total = total + asked.scale[n] * one(kind, (teacher.head @ normed).softmax(0), z, max(0, label))
        best.append(int(z.argmax()))
    return total, best


def inputs(queries: int, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(queries, CONFIG.hidden_size, dtype=torch.float64, requires_grad=True)
    head = torch.randn(CONFIG.draft_vocab_size, CONFIG.hidden_size, dtype=torch.float64, requires_grad=True)
    return x, head, torch.randn(positions, CONFIG.hidden_size, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["kl", "ce", "lk"])
@pytest.mark.parametrize("piece", [2, 256])
def test_every_loss_and_its_gradients_equal_the_definition(
    kind: Loss, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_loss, "_PIECE", piece)
    teacher = make_teacher()
    teacher.loss = kind
    steps = [[0, 1, 2, 4, 5], [1, 2, 5], [], [2]]  # 3 is asked by none, 0 and 4 by the first step alone
    asked = asked_of(teacher, steps)
    x, head, last = inputs(len(asked.at), 6)
    expected, best = by_definition(kind, x, head, last, teacher, asked)
    wanted = torch.autograd.grad(expected, [x, head])
    loss, _, found = head_loss(x, head, last, teacher, asked)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(torch.autograd.grad(loss, [x, head]), wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert found.tolist() == [b if b == own else -1 for b, own in zip(best, asked.label.tolist(), strict=True)]
    with torch.no_grad():
        assert head_loss(x, head, last, teacher, asked)[2].tolist() == best


def test_ce_never_asks_the_targets_head(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = make_teacher()
    teacher.loss = "ce"
    monkeypatch.setattr(teacher, "distributions", None)
    asked = asked_of(teacher, [[0, 1]])
    x, head, last = inputs(2, 2)
    assert head_loss(x, head, last, teacher, asked)[0].isfinite()


def test_the_lk_loss_is_least_where_the_draft_is_the_target() -> None:
    teacher = make_teacher()
    teacher.loss = "lk"
    asked = asked_of(teacher, [[0, 1, 2]])
    _, _, last = inputs(3, 3)
    x = F.rms_norm(last, teacher.norm.shape, teacher.norm, teacher.eps).requires_grad_()
    loss, _, _ = head_loss(x, teacher.head, last, teacher, asked)
    assert abs(float(loss.detach())) < 1e-9
    assert float(torch.autograd.grad(loss, x)[0].abs().max()) < 1e-9


def test_products_in_bfloat16_give_nearly_the_same_gradients() -> None:
    teacher, asked = make_teacher(dtype=torch.float32), asked_of(make_teacher(), [[0, 1, 2, 3], [1, 2, 3]])
    asked = Queries(asked.slices, asked.at, asked.label, asked.scale.float())
    x, head, last = (t.detach().float() for t in inputs(7, 4))
    grads = []
    for products in (None, torch.bfloat16):
        a, b = x.clone().requires_grad_(), head.clone().requires_grad_()
        loss, _, _ = head_loss(a, b, last, teacher, asked, products)
        grads.append(torch.autograd.grad(loss, [a, b]))
        assert all(g.dtype == torch.float32 for g in grads[-1])
    for exact, low in zip(*grads, strict=True):
        assert float((exact - low).norm() / exact.norm()) < 0.02


def test_no_tensor_of_positions_or_queries_by_vocabulary_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 160,000 tokens costs memory by the piece, whatever the number of positions."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            for t in found if isinstance(found, tuple | list) else [found]:
                if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == vocabulary:
                    self.rows = max(self.rows, t.shape[0])
            return found

    monkeypatch.setattr(_loss, "_PIECE", 4)
    vocabulary, positions = 1000, 50
    torch.manual_seed(0)
    teacher = Teacher(torch.ones(3), torch.randn(vocabulary, 3), 1e-5, torch.arange(vocabulary), vocabulary)
    at = torch.arange(positions)
    asked = Queries((slice(0, positions),), at, at, torch.ones(positions))
    x = torch.randn(positions, 3, requires_grad=True)
    with Largest() as largest:
        head_loss(x, torch.randn(vocabulary, 3), torch.randn(positions, 3), teacher, asked)[0].backward()
    assert 0 < largest.rows <= 4
