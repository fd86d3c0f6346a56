"""Bookkeeping of cache slots: which slot of the pool holds which position of a request.

R requests, S pool slots, P positions. `req_to_token` [rows, P] maps a request's row and a position to a slot. All functions
write in place, as SGLang's own kernels do; arguments stand in SGLang's order.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, pool_len: int
) -> None:
    """Note that positions start..end of each request lie in the next of `slots`, requests in turn."""
    read = 0
    for row, a, b in _spans(req_pool_indices, start, end):
        req_to_token[row, a:b] = slots[read : read + b - a].to(req_to_token.dtype)
        read += b - a


def assign_extend_cache_locs(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, pool_len: int
) -> None:
    """Read the slots of positions start..end of each request into `out`, requests in turn."""
    written = 0
    for row, a, b in _spans(req_pool_indices, start, end):
        out[written : written + b - a] = req_to_token[row, a:b].to(out.dtype)
        written += b - a


def assign_draft_cache_locs_contiguous(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    """Read the topk·steps slots behind each request's verified positions into `out` [R·topk·steps]."""
    count = topk * steps
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out[i * count : (i + 1) * count] = req_to_token[row, length : length + count].to(out.dtype)


def build_draft_decode_metadata(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, steps: int, pool_len: int
) -> Tensor:
    """A table like `req_to_token` with a row for each branch [R·topk, pool_len]: the verified positions, then the branch's own."""
    table = torch.zeros((req_pool_indices.numel() * topk, pool_len), dtype=req_to_token.dtype)
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        branches = table[i * topk : (i + 1) * topk]
        branches[:, :length] = req_to_token[row, :length]
        own = req_to_token[row, length : length + topk * steps].view(topk, steps)
        branches[:, length : length + steps] = own
    return table


def fill_bonus_tokens(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """The last emitted token of each request: tokens [R·stride] in rows, of which lengths[i] count."""
    last = torch.arange(lengths.numel()) * stride + lengths.long() - 1
    bonus.copy_(tokens.reshape(-1)[last])


def fill_accept_out_cache_loc(index: Tensor, slots: Tensor, out: Tensor) -> None:
    """Slots of the accepted tokens, packed to the front of `out`; index -1 stands for a token refused."""
    kept = slots[index.reshape(-1)[index.reshape(-1) > -1].long()]
    out[: kept.numel()] = kept


def copy_all_layer_kv_cache(data_ptrs: Tensor, strides: Tensor, to: Tensor, source: Tensor) -> None:
    """Copy slots `source` to slots `to` in every layer's keys and values, given by address and bytes a slot.

    All are read before any is written, for the two may overlap.
    """
    targets, sources = to.tolist(), source.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + slot * stride, stride) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + slot * stride, row, stride)


def rotate_input_ids(
    input_ids: Tensor, starts: Tensor, lengths: Tensor, new_tokens: Tensor, select: Tensor | None = None
) -> None:
    """Shift each request's ids one to the left and put its new token last (or where `select` says)."""
    fresh = new_tokens.reshape(-1)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if length > 0:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
            input_ids[start + length - 1 if select is None else int(select[i])] = fresh[i]


def _spans(rows: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    told = zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
    return [(row, a, b) for row, a, b in told if b > a]
