"""Attention in blocks against plain sums in float64; what it holds at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.drafts import _attention
from stages.drafts._attention import attend, divide

HEADS, KV, D = 4, 2, 6
ROWS = ((slice(0, 7), slice(0, 3)), (slice(7, 12), slice(3, 7)))
SEEN = torch.tensor([4, 5, 7, 2, 3, 4, 5])


def tensors(steps: int) -> list[Tensor]:
    torch.manual_seed(steps)
    shapes = [(7, HEADS, D), (12, KV, D), (12, KV, D), *[(7, KV, D)] * (2 * steps)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One query and one head at a time."""
    out = []
    for keys, queries in ROWS:
        for n in range(queries.start, queries.stop):
            seen = slice(keys.start, keys.start + int(SEEN[n]))
            for head in range(HEADS):
                g = head // (HEADS // KV)
                all_k = torch.cat([k[seen, g], *(a[n, g][None] for a, _ in chain)])
                all_v = torch.cat([v[seen, g], *(b[n, g][None] for _, b in chain)])
                out.append((all_k @ q[n, head] / D**0.5).softmax(0) @ all_v)
    return torch.stack(out).view(7, HEADS, D)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("limit", [1, 40, 1 << 20])
def test_blocks_of_any_size_equal_plain_attention(steps: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_attention.BLOCK_SCORES, "cpu", limit)
    monkeypatch.setattr(_attention, "LEAST_QUERIES", 1)
    given = tensors(steps)
    chain = list(zip(given[3::2], given[4::2], strict=True))
    expected = plain(*given[:3], chain)  # type: ignore[arg-type]
    found = attend(*given[:3], chain, divide(ROWS, SEEN, HEADS))  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), given),
        torch.autograd.grad((expected * weight).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("length", [4096, 32768])
def test_a_long_row_is_held_in_blocks_of_the_stated_size(length: int) -> None:
    heads = 8
    counts = torch.arange(1, length + 1)
    seen = divide([(slice(0, length), slice(0, length))], counts, heads)
    limit = max(_attention.BLOCK_SCORES["cpu"], _attention.LEAST_QUERIES * length * heads)
    sizes = [(b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) * heads for b in seen.blocks]
    assert max(sizes) <= limit < length * length * heads / 100
    assert [b.queries.start for b in seen.blocks] == [0, *(b.queries.stop for b in seen.blocks[:-1])]
    assert seen.blocks[-1].queries.stop == length


def test_what_is_kept_for_the_way_back_grows_with_the_row_not_its_square() -> None:
    def kept(length: int) -> int:
        size = 0

        def pack(t: Tensor) -> Tensor:
            nonlocal size
            size += t.numel()
            return t

        q, k, v = (torch.randn(length, n, D, requires_grad=True) for n in (HEADS, KV, KV))
        rows = [(slice(0, length), slice(0, length))]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            attend(q, k, v, [], divide(rows, torch.arange(1, length + 1), HEADS))
        return size

    assert kept(400) == 4 * kept(100)


def test_bfloat16_products_give_nearly_the_same_gradients() -> None:
    exact = [t.detach().float().requires_grad_() for t in tensors(2)]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        given = [t.detach().to(dtype).requires_grad_() for t in exact]
        chain = list(zip(given[3::2], given[4::2], strict=True))
        out = attend(*given[:3], chain, divide(ROWS, SEEN, HEADS))  # type: ignore[arg-type]
        found.append(torch.autograd.grad(out.float().pow(2).sum(), given))
    for a, b in zip(*found, strict=True):
        assert float((a - b.float()).norm() / a.norm()) < 0.02
