"""Attention over a scattered cache gives what torch's own gives over the same keys and values laid in a row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from draftline_sglang_cpu.attention import attend, decode_attention, extend_attention
from torch import Tensor

HEADS, KV, E, POOL = 6, 2, 8, 64
SCALE = 0.3


class Cache:
    """Requests of the given lengths, their positions scattered over the pool; `q`, and keys and values a request."""

    def __init__(self, lengths: list[int], new: list[int], seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.lengths, self.new = torch.tensor(lengths), torch.tensor(new)
        self.table = torch.zeros(5, 32, dtype=torch.int32)
        self.rows = torch.tensor([3, 1, 4][: len(lengths)])
        slots = torch.randperm(POOL, generator=g)
        self.k_pool, self.v_pool = torch.randn(2, POOL, KV, E, generator=g)
        at = 0
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            self.table[row, :length] = slots[at : at + length].int()
            at += length
        self.q = torch.randn(sum(new), HEADS, E, generator=g)
        self.out = torch.zeros_like(self.q)

    def kv(self, i: int) -> tuple[Tensor, Tensor]:
        slots = self.table[self.rows[i], : self.lengths[i]].long()
        return self.k_pool[slots], self.v_pool[slots]

    def part(self, i: int) -> slice:
        start = int(self.new[:i].sum())
        return slice(start, start + int(self.new[i]))

    def extend(
        self,
        window: int = 0,
        tree_mask: Tensor | None = None,
        cap: float = 0.0,
        sinks: Tensor | None = None,
        fresh: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    ) -> Tensor:
        starts = torch.cat([torch.zeros(1, dtype=torch.long), self.new.cumsum(0)[:-1]])
        extend_attention(
            self.q, *fresh, self.out, self.k_pool, self.v_pool, 1.0, 1.0, self.table, self.rows, self.lengths, self.new,
            starts, int(self.new.max()), SCALE, cap, False, window, None, sinks, tree_mask, True,
        )  # fmt: skip
        return self.out


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """torch's own, with its own handling of grouped heads."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("window", [0, 3])
def test_new_tokens_see_all_before_them_and_none_behind(window: int) -> None:
    cache = Cache([7, 12, 5], [7, 4, 1])
    out = cache.extend(window)
    for i in range(3):
        length, new = int(cache.lengths[i]), int(cache.new[i])
        query, key = torch.arange(length - new, length)[:, None], torch.arange(length)
        mask = (key <= query) & (key > query - window if window else key <= query)
        torch.testing.assert_close(out[cache.part(i)], plain(cache.q[cache.part(i)], *cache.kv(i), mask))


@pytest.mark.parametrize("laid", ["by head", "flat"])
def test_keys_of_new_tokens_are_those_that_come_with_them_and_not_what_the_pool_holds(laid: str) -> None:
    cache = Cache([7, 12], [7, 4])
    keys, values = torch.randn(2, 11, KV, E, generator=torch.Generator().manual_seed(3))
    fresh = (keys, values) if laid == "by head" else (keys.flatten(1), values.flatten(1))
    out = cache.extend(fresh=fresh)
    for i, (length, new) in enumerate([(7, 7), (12, 4)]):
        k, v = (
            torch.cat([old[: length - new], x[cache.part(i)]])
            for old, x in zip(cache.kv(i), (keys, values), strict=True)
        )
        mask = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        torch.testing.assert_close(out[cache.part(i)], plain(cache.q[cache.part(i)], k, v, mask))


def test_a_prefill_brings_expanded_keys_where_the_pool_holds_latents() -> None:
    """Latent attention: as many heads of keys as of queries, values of another width, one latent a token in the pool."""
    cache = Cache([5, 3], [5, 3])
    cache.k_pool = torch.randn(POOL, 1, E + 4)
    cache.v_pool = cache.k_pool[..., :E]
    g = torch.Generator().manual_seed(4)
    k, v = torch.randn(8, HEADS, E, generator=g), torch.randn(8, HEADS, E - 2, generator=g)
    cache.out = torch.zeros(8, HEADS, E - 2)
    out = cache.extend(fresh=(k, v))
    for i, length in enumerate([5, 3]):
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        at = cache.part(i)
        torch.testing.assert_close(out[at], plain(cache.q[at], k[at], v[at], mask))
    later = Cache([5], [2])
    later.k_pool = later.v_pool = torch.randn(POOL, 1, E + 4)
    with pytest.raises(NotImplementedError, match="a prefix of latents"):
        later.extend(fresh=(k[:2], v[:2]))


def test_one_token_is_stored_and_then_sees_itself() -> None:
    cache = Cache([9, 4], [1, 1])
    k, v = torch.randn(2, 2, KV, E, generator=torch.Generator().manual_seed(1))
    loc = torch.stack([cache.table[cache.rows[i], cache.lengths[i] - 1] for i in range(2)]).long()
    decode_attention(
        cache.q, cache.k_pool, cache.v_pool, 1.0, 1.0, cache.out, k, v, loc, None, cache.table, cache.rows, cache.lengths,
        SCALE, 0.0, False, 0, None, None,
    )  # fmt: skip
    assert torch.equal(cache.k_pool[loc], k) and torch.equal(cache.v_pool[loc], v)
    for i in range(2):
        everything = torch.ones(1, int(cache.lengths[i]), dtype=torch.bool)
        torch.testing.assert_close(cache.out[i : i + 1], plain(cache.q[i : i + 1], *cache.kv(i), everything))


def test_a_window_cuts_what_a_single_token_sees() -> None:
    cache = Cache([9], [1])
    decode_attention(
        cache.q, cache.k_pool, cache.v_pool, 1.0, 1.0, cache.out, None, None, None, None, cache.table, cache.rows,
        cache.lengths, SCALE, 0.0, False, 4, None, None,
    )  # fmt: skip
    k, v = cache.kv(0)
    torch.testing.assert_close(cache.out, plain(cache.q, k[-4:], v[-4:], torch.ones(1, 4, dtype=torch.bool)))


def test_in_a_tree_each_node_sees_its_own_branch() -> None:
    """Nodes 0-1-3 and 0-2 of the tree: node 3 gets what it would get if its branch alone had been written."""
    cache = Cache([10, 9], [4, 4])
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    chain = torch.ones(4, 4, dtype=torch.bool).tril()
    out = cache.extend(tree_mask=torch.cat([tree.reshape(-1), chain.reshape(-1)]))
    k, v = cache.kv(0)
    branch = [*range(6), 6, 7, 9]
    alone = plain(cache.q[3:4], k[branch], v[branch], torch.ones(1, 9, dtype=torch.bool))
    torch.testing.assert_close(out[3:4], alone)
    mask = torch.arange(9) <= torch.arange(5, 9)[:, None]
    torch.testing.assert_close(out[4:], plain(cache.q[4:], *cache.kv(1), mask))


def test_a_logit_cap_bends_logits_before_the_softmax() -> None:
    q, k, v = torch.randn(3, 4, 2, E, generator=torch.Generator().manual_seed(2))
    logits = 5 * torch.tanh(torch.einsum("qhe,khe->hqk", q, k) * SCALE / 5)
    expected = torch.einsum("hqk,khe->qhe", logits.softmax(-1), v)
    torch.testing.assert_close(attend(q, k, v, None, SCALE, 5.0), expected)


def test_what_the_stand_in_cannot_do_it_says() -> None:
    with pytest.raises(NotImplementedError, match="attention sinks"):
        Cache([3], [1]).extend(sinks=torch.zeros(HEADS))
