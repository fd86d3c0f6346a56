"""bfloat16 products beside float32 weights: near the exact ones, of few shapes, and used only where a gradient is taken."""

from __future__ import annotations

import pytest
import torch

from stages.drafts._products import Linear, filled_up, linear, lowered
from stages.drafts._start import products_dtype
from stages.drafts.eagle3 import Teacher, look_ahead
from tests.drafts.reference import CONFIG, make_batch, make_draft, make_teacher

F32, LOW = torch.float32, torch.bfloat16


def test_outputs_and_gradients_are_near_the_exact_ones_and_float32() -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(70, 48, requires_grad=True), Linear(48, 40)
    exact = layer(x)
    wanted = torch.autograd.grad(exact.pow(2).sum(), [x, layer.weight])
    with torch.autocast("cpu", dtype=LOW):
        low = linear(x, layer.weight)
        assert torch.equal(layer(x), low)
    found = torch.autograd.grad(low.pow(2).sum(), [x, layer.weight])
    for a, b in zip((exact, *wanted), (low, *found), strict=True):
        assert b.dtype == F32 and b.shape == a.shape
        assert 0 < float(((a - b).norm() / a.norm()).detach()) < 0.02


def test_batches_of_many_lengths_come_to_few_shapes() -> None:
    assert {filled_up(n) for n in range(1, 1025)} == set(range(64, 1025, 64))


def test_training_in_bfloat16_gives_gradients_near_those_in_float32() -> None:
    draft, batch = make_draft(dtype=F32), make_batch(["0001111110", "00111", "0110111101"], dtype=F32)
    t = make_teacher(dtype=F32)
    found = []
    for products in (None, LOW):
        teacher = Teacher(t.norm, t.head, t.eps, t.target_ids, CONFIG.vocab_size, products=products)
        ahead = look_ahead(draft, teacher, batch, 3, 0.8)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(ahead.loss, list(draft.parameters()))]))
    exact, low = found
    assert 0 < float((exact - low).norm() / exact.norm()) < 0.05


def test_what_is_measured_is_exact_whatever_training_multiplies_in() -> None:
    draft, batch = make_draft(dtype=F32), make_batch(["0001111110"], dtype=F32)
    t = make_teacher(dtype=F32)
    low = Teacher(t.norm, t.head, t.eps, t.target_ids, CONFIG.vocab_size, products=LOW)
    with torch.no_grad():
        one, two = (look_ahead(draft, teacher, batch, 3, 0.8) for teacher in (t, low))
    assert torch.equal(one.loss, two.loss) and torch.equal(one.drafted, two.drafted)


@pytest.mark.parametrize(
    ("has", "expected"), [({"avx512_bf16": True}, LOW), ({"amx_bf16": True}, LOW), ({"avx2": True}, F32)]
)
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(
    has: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert products_dtype("auto", torch.device("cpu")) == expected
    assert products_dtype("float32", torch.device("cpu")) == F32
    assert products_dtype("auto", torch.device("cuda")) == LOW


def test_a_frozen_weight_is_turned_once_and_again_when_it_is_written_to() -> None:
    weight = torch.randn(8, 4)
    first = lowered(weight, LOW)
    assert torch.equal(first, weight.to(LOW)) and lowered(weight, LOW) is first
    weight.mul_(2)
    assert torch.equal(lowered(weight, LOW), weight.to(LOW))
    trained = torch.randn(8, 4, requires_grad=True)
    assert lowered(trained, LOW) is not lowered(trained, LOW)
