"""Training-time test over packed rows: several draft steps, only where a loss looks, no padding.

A root is a pair p that the server can ask for a draft: l[p+1] & l[p+2] (l the loss mask), for its first draft call has
the first generated token as input. From root p the server decodes a chain, as is computed here for all roots at once:

    step 0   query p       keys: the pairs 0..p of the row, made from the target's states
    step i   query p + i   keys: the same pairs 0..p, and the chain's own steps 1..i at p+1..p+i

In training the chain is fed the row's true tokens (as EAGLE-3 does): equal to its own as long as all were accepted.
Step i of root p predicts t[p+2+i] and is matched with the target's distribution at p+1+i. A root lives on to step i
while t[p+1] to t[p+2+i] are all supervised.

Shape suffixes: T tokens of the batch, K keys (pairs from the target's states), N queries of a step, S positions whose
target distribution is needed, H hidden size, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.drafts._attention import Seen, attend, divide
from stages.drafts._loss import Queries, Teacher, head_loss
from stages.drafts._module import Eagle3, rotary, rotate
from stages.drafts._products import linear


@dataclass(frozen=True)
class PackedBatch:
    """Rows laid end to end. input_ids i64 [T], loss_mask bool [T], aux [T, 3H] and last [T, H] (before the final norm)."""

    row_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor


@dataclass(frozen=True)
class Span:
    """One row with roots: its keys in the key list, and of every step its queries in that step's list."""

    keys: slice
    queries: tuple[slice, ...]


@dataclass(frozen=True)
class Layout:
    """Who is computed and who sees whom. All indices point into the flat batch unless said.

    Args:
        keys_K: pairs that give keys and values: each row's, up to its last root.
        roots: of every step, the roots alive [N].
        keep: of every step from 1, which of the former step's queries live on (indices into them).
        positions_T: position of every token in its row.
        spans: the rows with roots.
    """

    keys_K: Tensor
    roots: tuple[Tensor, ...]
    keep: tuple[Tensor, ...]
    positions_T: Tensor
    spans: tuple[Span, ...]


def lay_out(loss_mask_T: Tensor, lengths: Sequence[int], steps: int) -> Layout:
    """Find the roots by the serve-exact mask and what they need."""
    device = loss_mask_T.device
    sizes = torch.tensor(lengths, device=device)
    row_T = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)
    starts = sizes.cumsum(0) - sizes
    positions_T = torch.arange(len(loss_mask_T), device=device) - starts[row_T]
    left_T = sizes[row_T] - positions_T  # tokens from here to the row's end, this one included

    def ahead(by: int) -> Tensor:
        moved = torch.zeros_like(loss_mask_T)
        if by < len(loss_mask_T):
            moved[:-by] = loss_mask_T[by:]
        return moved & (left_T > by)

    alive = [ahead(1) & ahead(2)]
    for i in range(1, steps):
        alive.append(alive[-1] & ahead(2 + i))
    roots = tuple(a.nonzero()[:, 0] for a in alive)
    last_root = torch.full((len(lengths),), -1, device=device)
    last_root.scatter_reduce_(0, row_T[roots[0]], positions_T[roots[0]], "amax")
    keys_K = (positions_T <= last_root[row_T]).nonzero()[:, 0]
    keep = tuple(now[before].nonzero()[:, 0] for before, now in zip(roots[:-1], alive[1:], strict=True))
    counts = [torch.bincount(row_T[x], minlength=len(lengths)).tolist() for x in (keys_K, *roots)]
    return Layout(keys_K, roots, keep, positions_T, tuple(_spans(counts)))


def _spans(counts: list[list[int]]) -> Iterator[Span]:
    at = [0] * len(counts)
    for row in zip(*counts, strict=True):
        slices = [slice(a, a + n) for a, n in zip(at, row, strict=True)]
        at = [s.stop for s in slices]
        if row[0]:
            yield Span(slices[0], tuple(slices[1:]))


def kept_or_made_again(draft: Eagle3, made: Callable[..., Any], *args: Any) -> Any:
    """made(*args); where `draft.recompute_steps`, only tensors among `args` are kept for the way back, and the rest is made again."""
    if not draft.recompute_steps or not torch.is_grad_enabled():
        return made(*args)
    return checkpoint(made, *args, use_reentrant=False, preserve_rng_state=False)  # nothing here is random


def chain_states(draft: Eagle3, batch: PackedBatch, layout: Layout) -> list[Tensor]:
    """h [N, H] (before `norm`) of every step's queries, in the order of `layout.roots`.

    A token is fed at several steps and its embedding is always normed alike, so its half of the projections is made once.
    With `draft.recompute_steps` a step leaves its h, key and value behind for the way back, and nothing else.
    """
    attention, c, norm = draft.midlayer.self_attn, draft.config, draft.midlayer.hidden_norm
    D, kv, groups = c.head_dim, c.kv_heads * c.head_dim, (c.heads, c.kv_heads, c.kv_heads)
    halves = [p.weight.split(c.hidden_size, dim=1) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    of_token, of_state = (torch.cat(half) for half in zip(*halves, strict=True))
    keys, roots = layout.keys_K, [r for r in layout.roots if len(r)]
    fed = [r + 1 + i for i, r in enumerate(roots)]  # flat index of the token that each query is fed
    queried, known = torch.unique(torch.cat(fed)), torch.unique(torch.cat([keys + 1, *fed]))
    embedded = draft.midlayer.input_layernorm(F.embedding(batch.input_ids[known], draft.embedding))
    token_q = linear(embedded.index_select(0, torch.searchsorted(known, queried)), of_token[: -2 * kv])
    token_kv = linear(embedded, of_token[-2 * kv :])

    def from_token(at: Tensor) -> Tensor:
        q, rest = token_q.index_select(0, torch.searchsorted(queried, at)), torch.searchsorted(known, at)
        return torch.cat([q, token_kv.index_select(0, rest)], dim=-1)

    def seen(step: int) -> Seen:
        rows = [(span.keys, span.queries[step]) for span in layout.spans]
        return divide(rows, layout.positions_T[layout.roots[step]] + 1, c.heads)

    position_K = layout.positions_T[keys]
    g_KH = draft.fuse(batch.aux[keys]).to(batch.aux.dtype)  # the residual stays exact where products are not
    normed = norm(g_KH)
    kv_K = token_kv.index_select(0, torch.searchsorted(known, keys + 1)) + linear(normed, of_state[-2 * kv :])
    k, v = kv_K.view(len(keys), 2 * c.kv_heads, D).split(c.kv_heads, dim=1)
    k_KHD, v_KHD = rotate(k, rotary(c, position_K, k)), v
    at = torch.searchsorted(keys, roots[0])

    def first(seen: Seen) -> Tensor:
        q = token_q.index_select(0, torch.searchsorted(queried, fed[0]))
        q = (q + linear(normed.index_select(0, at), of_state[: -2 * kv])).view(len(at), -1, D)
        q = rotate(q, rotary(c, position_K[at], q))
        return draft.block_output(g_KH.index_select(0, at), attend(q, k_KHD, v_KHD, [], seen))

    def further(step: int, seen: Seen, h: Tensor, *chain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h of this step, and what it adds to the chain; `h` and `chain` (key and value by step) as the steps before left them."""
        g = draft.handed_on(h.index_select(0, layout.keep[step - 1]))
        qkv = from_token(fed[step]) + linear(norm(g), of_state)
        q, k, v = qkv.view(len(g), -1, D).split(groups, dim=1)
        table = rotary(c, layout.positions_T[roots[step]] + step, q)
        own = rotate(k, table), v.contiguous()  # else all of qkv is kept
        alive = [torch.searchsorted(roots[i], roots[step]) for i in range(1, step)]
        before = [
            (k.index_select(0, i), v.index_select(0, i)) for k, v, i in zip(chain[::2], chain[1::2], alive, strict=True)
        ]
        return draft.block_output(g, attend(rotate(q, table), k_KHD, v_KHD, [*before, own], seen)), *own

    found: list[Tensor] = [kept_or_made_again(draft, first, seen(0))]
    chain: list[Tensor] = []
    for step in range(1, len(roots)):
        h, *own = kept_or_made_again(draft, further, step, seen(step), found[-1], *chain)
        found.append(h)
        chain += own
    return found


@dataclass(frozen=True)
class Ahead:
    """What the draft made of a batch.

    Args:
        loss: in nats, step weights normalised, mean over the batch's roots; differentiable in training.
        roots: flat index of every root [N].
        drafted: target ids drafted at every step, [N, steps]; -1 where the row's supervised run ends before, and, while
            a gradient is taken, where another id than the row's own was the best.
        hits: drafted tokens equal to the row's own, by step; while a gradient is taken, one whose logit ties with the best
            counts too, and bfloat16 logits tie now and then.
        tried: roots alive, by step.
    """

    loss: Tensor
    roots: Tensor
    drafted: Tensor
    hits: tuple[int, ...]
    tried: tuple[int, ...]


def look_ahead(
    draft: Eagle3, teacher: Teacher, batch: PackedBatch, steps: int, decay: float, *, roots_in_all: int | None = None
) -> Ahead:
    """Run `steps` draft steps from every root, fed the row's true tokens, against the target's distributions.

    Args:
        roots_in_all: what the loss is divided by: the roots of all batches of an optimizer step, where this is one of
            several; none: this batch's own.

    Where the target's own choice lies outside the draft vocabulary nothing is added to the loss. That choice is taken
    to be the row's token: on-policy rows of temperature 0 are the target's argmax, and its logits over the whole
    vocabulary would cost as much as a draft step. A batch without roots has loss 0.
    """
    layout = lay_out(batch.loss_mask, batch.lengths, steps)
    roots = layout.roots[0]
    drafted = batch.input_ids.new_full((len(roots), steps), -1)
    if not len(roots):
        return Ahead(draft.fc.weight.sum() * 0, roots, drafted, (0,) * steps, (0,) * steps)
    weights = torch.tensor([decay**i for i in range(steps)], dtype=torch.float64)
    weights = (weights / weights.sum() / (roots_in_all or len(roots))).tolist()
    low = teacher.products if torch.is_grad_enabled() else None
    with torch.autocast(
        roots.device.type, dtype=low or torch.bfloat16, enabled=low not in (None, draft.fc.weight.dtype)
    ):
        states = chain_states(draft, batch, layout)
    alive = layout.roots[: len(states)]
    predicted = torch.cat([r + 1 + i for i, r in enumerate(alive)])
    needed = torch.unique(predicted)
    own = batch.input_ids[predicted + 1]
    sizes = [len(r) for r in alive]
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    slices = tuple(slice(a, b) for a, b in itertools.pairwise(edges))
    label = teacher.draft_id[own]
    scale = torch.cat([batch.last.new_full((n,), w) for n, w in zip(sizes, weights, strict=False)]) * (label >= 0)
    asked = Queries(slices, torch.searchsorted(needed, predicted), label, scale)
    x, last = torch.cat([kept_or_made_again(draft, draft.norm, h) for h in states]), batch.last[needed]
    loss, _, best = head_loss(x, draft.lm_head.weight, last, teacher, asked, low)
    ids = torch.where(best < 0, -1, teacher.target_ids[best])
    hits, index = [0] * steps, torch.arange(len(roots), device=roots.device)
    for i, part in enumerate(slices):
        index = index if i == 0 else index[layout.keep[i - 1]]
        drafted[index, i] = ids[part]
        hits[i] = int((ids[part] == own[part]).sum())
    return Ahead(loss, roots, drafted, tuple(hits), tuple(sizes + [0] * (steps - len(sizes))))
