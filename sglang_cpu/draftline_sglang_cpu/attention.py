"""Attention over SGLang's paged cache, in plain torch.

A request's keys and values lie anywhere in the pool; `req_to_token[row, position]` is the pool slot of a position. Shapes: R
requests, T new tokens of all requests laid end to end, N pool slots, E head size; heads of queries are a multiple of those of
keys. Arguments stand in the order in which SGLang's intel_amx backend passes them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, logit_cap: float = 0.0) -> Tensor:
    """softmax(q·k·scale) · v in float32.

    Args:
        q: [Q, heads, E]; k, v: [K, kv_heads, E].
        mask: [Q, K], true where a query may look; None: everywhere.
        logit_cap: c > 0 turns a logit x into c·tanh(x / c).

    Returns:
        [Q, heads, E of v], in the dtype of q.
    """
    groups = q.shape[1] // k.shape[1]
    q_, k_, v_ = (x.transpose(0, 1).float() for x in (q, k, v))
    k_, v_ = (x.repeat_interleave(groups, 0) for x in (k_, v_))
    if not logit_cap or logit_cap <= 0:
        out = F.scaled_dot_product_attention(q_[None], k_[None], v_[None], attn_mask=mask, scale=scale)[0]
    else:
        logits = logit_cap * torch.tanh(q_ @ k_.transpose(1, 2) * (scale / logit_cap))
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        out = logits.softmax(-1) @ v_
    return out.transpose(0, 1).to(q.dtype)


def decode_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: float,
    v_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor | None,
    attn_logits: Tensor | None,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token a request, over its first `seq_lens` positions; its own key and value are stored first when given.

    q, out: [R, heads, E]; window > 0: only the last so many positions are seen.

    Raises:
        NotImplementedError: cross attention, attention sinks or a scaled cache, which no text model here has.
    """
    _demand_plain(is_cross, sinks, k_scale, v_scale)
    if k is not None and v is not None:
        k_pool[loc] = k.reshape(-1, *k_pool.shape[1:]).to(k_pool.dtype)
        v_pool[loc] = v.reshape(-1, *v_pool.shape[1:]).to(v_pool.dtype)
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, max(0, length - window) if window > 0 else 0 : length].long()
        out[i] = attend(q[i : i + 1], k_pool[slots], v_pool[slots], None, scale, logit_cap)[0]


def extend_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int | None,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """The last `extend_seq_lens` of each request's `seq_lens` positions.

    q, out: [T, heads, E]; request i's part starts at extend_start_loc[i]. Keys and values of earlier positions are read from the
    pool, those of the new ones from k and v, or from the pool too where these are None. tree_mask: for verification of a tree,
    of each request in turn [new, new] laid flat: which of the new tokens a new token sees, in place of the causal order.

    Raises:
        NotImplementedError: cross attention, attention sinks or a scaled cache, which no text model here has; expanded keys
            behind a prefix that the pool holds as latents, which SGLang attends to by another way.
    """
    _demand_plain(is_cross, sinks, k_scale, v_scale)
    told = (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)
    read = 0
    for row, length, new, start in zip(*(x.tolist() for x in told), strict=True):
        slots = req_to_token[row, :length].long()
        mask = None
        if is_causal:
            query, key = torch.arange(length - new, length)[:, None], torch.arange(length)
            mask = key <= query
            if tree_mask is not None:
                mask[:, length - new :] = tree_mask.reshape(-1)[read : read + new * new].view(new, new).bool()
                read += new * new
            if window > 0:
                mask &= key > query - window
        part = slice(start, start + new)
        keys, values = (_seen(x, pool, part, slots) for x, pool in ((k, k_pool), (v, v_pool)))
        out[part] = attend(q[part], keys, values, mask, scale, logit_cap)


def _seen(fresh: Tensor | None, pool: Tensor, part: slice, slots: Tensor) -> Tensor:
    """[K, kv_heads, E] of one request. Latent attention keeps one latent a token in the pool, and its prefill brings the keys
    and values of all heads: then the two differ in shape, and nothing may stand before the new tokens."""
    if fresh is None:
        return pool[slots]
    new = fresh[part] if fresh.dim() == 3 else fresh[part].view(-1, *pool.shape[1:])
    before = slots[: len(slots) - len(new)]
    if not len(before):
        return new
    if new.shape[1:] != pool.shape[1:]:
        raise NotImplementedError("a prefix of latents beside expanded keys is not part of this stand-in")
    return torch.cat([pool[before], new.to(pool.dtype)])


def _demand_plain(is_cross: bool, sinks: Tensor | None, k_scale: float, v_scale: float) -> None:
    if is_cross or sinks is not None or (k_scale, v_scale) != (1.0, 1.0):
        raise NotImplementedError("cross attention, attention sinks and scaled caches are not part of this stand-in")
