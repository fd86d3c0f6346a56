"""Attention of one draft step over packed rows: exact, in blocks, with nothing of the size queries x keys kept.

A query sees the pairs of its row up to its root and, from step 1, its own chain: one key a step. Both are weighed by one
softmax: the sum over the pairs is taken block by block, that over the chain beside it, and the two are joined by their
log-sum-exp. For the way back only outputs and log-sums are kept, and the weights are made again.

Memory: a block holds at most BLOCK_SCORES weights, or LEAST_QUERIES queries' where those are more; all else is linear in queries
and keys. A row of 32,000 tokens with 32 heads: 256 MB of float32 a block on a GPU, 64 MB on a CPU.

Shape suffixes: N queries of this step, K keys (pairs), h heads, k key-value heads, g query heads of a key-value head, D head
size, J steps of the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}  # on a CPU a block stays in the cache
LEAST_QUERIES = 16  # for which keys and values are read: one by one, a long row takes twice the time


@dataclass(frozen=True)
class Block:
    """Queries of one row, the keys that any of them sees, and the first of these that some do not."""

    queries: slice
    keys: slice
    first_hidden: int


@dataclass(frozen=True)
class Seen:
    """Who sees what in a step: blocks that hold every query once; keys_seen [N], how many of its row's keys each sees."""

    blocks: tuple[Block, ...]
    keys_seen: Tensor

    def hidden(self, block: Block) -> Tensor:
        """[n, keys from the first hidden one]: which are."""
        stop = block.keys.stop - block.keys.start
        columns = torch.arange(block.first_hidden, stop, device=self.keys_seen.device)
        return columns >= self.keys_seen[block.queries, None]


def divide(rows: Sequence[tuple[slice, slice]], keys_seen: Tensor, heads: int) -> Seen:
    """Blocks of at most BLOCK_SCORES weights, or LEAST_QUERIES queries.

    Args:
        rows: of every row, its keys in the key list and its queries in the step's list.
        keys_seen: of every query, ascending within a row.
    """
    counts, limit, blocks = keys_seen.tolist(), BLOCK_SCORES[keys_seen.device.type], []
    for keys, queries in rows:
        at = queries.start
        while at < queries.stop:
            end = min(at + LEAST_QUERIES, queries.stop)
            while end < queries.stop and (end + 1 - at) * counts[end] * heads <= limit:
                end += 1
            blocks.append(Block(slice(at, end), slice(keys.start, keys.start + counts[end - 1]), counts[at]))
            at = end
    return Seen(tuple(blocks), keys_seen)


def _scores(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """[k, g·n, keys] of queries [n, k, g, D] (scaled) over keys [keys, k, D]; -inf where hidden (the last columns)."""
    n, kv, g, D = q.shape
    s = _exact(q.permute(1, 2, 0, 3).reshape(kv, g * n, D) @ k.permute(1, 2, 0))
    if hidden.shape[1]:
        s.view(kv, g, n, -1)[..., -hidden.shape[1] :].masked_fill_(hidden, -torch.inf)
    return s


def _by_query(x: Tensor, n: int) -> Tensor:
    """[k, g·n, …] to [n, k, g, …]."""
    kv, rows = x.shape[:2]
    return x.view(kv, rows // n, n, *x.shape[2:]).movedim(2, 0)


def _by_head(x: Tensor) -> Tensor:
    """[n, k, g, …] to [k, g·n, …]."""
    n, kv, g = x.shape[:3]
    return x.movedim(0, 2).reshape(kv, g * n, *x.shape[3:])


def _exact(x: Tensor) -> Tensor:
    """In float32 at the least: what is summed or taken the exponent of."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Attend(torch.autograd.Function):
    """Products in the dtype of q, k and v; scores, weights and sums in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chain_k: Tensor, chain_v: Tensor, seen: Seen) -> Tensor:
        N, kv, g, D = q.shape
        with torch.autocast(q.device.type, enabled=False):
            q = q * D**-0.5
            out, total = _exact(torch.empty_like(q)), _exact(q.new_empty(N, kv, g))
            for block in seen.blocks:
                own, keys = block.queries, block.keys
                s = _scores(q[own], k[keys], seen.hidden(block))
                p = s.softmax(dim=-1)
                # The log of a softmax's sum, from its highest entry: a fraction of torch.logsumexp's time.
                total[own] = _by_query(s.amax(dim=-1) - p.amax(dim=-1).log(), own.stop - own.start)
                out[own] = _by_query(_exact(p.to(v.dtype) @ v[keys].transpose(0, 1)), own.stop - own.start)
            if chain_k.shape[0]:
                c = torch.einsum("nkgd,jnkd->nkgj", _exact(q), _exact(chain_k))
                joined = torch.cat([total[..., None], c], dim=-1).logsumexp(dim=-1)
                out *= torch.exp(total - joined)[..., None]
                out += torch.einsum("nkgj,jnkd->nkgd", torch.exp(c - joined[..., None]), _exact(chain_v))
                total = joined
        ctx.save_for_backward(q, k, v, chain_k, chain_v, out, total)
        ctx.seen = seen
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, chain_k, chain_v, out, total = ctx.saved_tensors
        dout, D = grads[0], q.shape[-1]
        mean, low = (dout * out).sum(dim=-1), q.dtype
        dq, dk, dv = (_exact(torch.zeros_like(t)) for t in (q, k, v))
        dchain_k, dchain_v = torch.empty_like(chain_k), torch.empty_like(chain_v)
        if chain_k.shape[0]:
            c = torch.einsum("nkgd,jnkd->nkgj", _exact(q), _exact(chain_k))
            weight = torch.exp(c - total[..., None])
            dc = weight * (torch.einsum("nkgd,jnkd->nkgj", dout, _exact(chain_v)) - mean[..., None])
            dq += torch.einsum("nkgj,jnkd->nkgd", dc, _exact(chain_k))
            dchain_k = torch.einsum("nkgj,nkgd->jnkd", dc, _exact(q))
            dchain_v = torch.einsum("nkgj,nkgd->jnkd", weight, dout)
        for block in ctx.seen.blocks:
            own, keys, n = block.queries, block.keys, block.queries.stop - block.queries.start
            p = _scores(q[own], k[keys], ctx.seen.hidden(block)).sub_(_by_head(total[own])[..., None]).exp_()
            d = _by_head(dout[own]).to(low)
            dv[keys] += (p.to(low).transpose(1, 2) @ d).transpose(0, 1)
            p *= _exact(d @ v[keys].permute(1, 2, 0)).sub_(_by_head(mean[own])[..., None])
            p = p.to(low)
            dq[own] += _by_query(p @ k[keys].transpose(0, 1), n)
            dk[keys] += (p.transpose(1, 2) @ _by_head(q[own])).transpose(0, 1)
        found = (dq * D**-0.5, dk, dv, dchain_k, dchain_v)
        return (*(g.to(t.dtype) for g, t in zip(found, (q, k, v, chain_k, chain_v), strict=True)), None)


def attend(q_NhD: Tensor, k_KkD: Tensor, v_KkD: Tensor, chain: Sequence[tuple[Tensor, Tensor]], seen: Seen) -> Tensor:
    """Heads' outputs [N, heads, D]: each query over its row's pairs up to its root and its own chain.

    Args:
        q_NhD: rotated queries of this step.
        k_KkD, v_KkD: rotated keys and values of the pairs; fewer heads when grouped.
        chain: keys and values of steps 1 to this one at these queries, each [N, kv heads, D].
    """
    N, heads, D = q_NhD.shape
    kv = k_KkD.shape[1]
    empty = k_KkD.new_empty(0, N, kv, D)
    chain_k, chain_v = (torch.stack(t) for t in zip(*chain, strict=True)) if chain else (empty, empty)
    return _Attend.apply(q_NhD.view(N, kv, heads // kv, D), k_KkD, v_KkD, chain_k, chain_v, seen).view(N, heads, D)  # type: ignore[no-any-return]
