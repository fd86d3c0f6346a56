"""Training-time test over packed rows: several draft steps, only where a loss looks, no padding.

A root is a pair p that the server can ask for a draft: l[p+1] & l[p+2] (l the loss mask), for its first draft call has
the first generated token as input. From root p the server decodes a chain, as is computed here for all roots at once:

    step 0   query p       keys: the pairs 0..p of the row, made from the target's states
    step i   query p + i   keys: the same pairs 0..p, and the chain's own steps 1..i at p+1..p+i

In training the chain is fed the row's true tokens (as EAGLE-3 does): equal to its own as long as all were accepted.
Step i of root p predicts t[p+2+i] and is matched with the target's distribution at p+1+i. A root lives on to step i
while t[p+1] to t[p+2+i] are all supervised. Where the teacher's `chains` are "accepted", training follows it only while
each token was also the draft's best: what the server would have it draft. Own tokens elsewhere have no label, for the target's
distribution is known behind the row's tokens alone (vllm-project/speculators#818).

Shape suffixes: T tokens of the batch, K keys (pairs from the target's states), N queries of a step, S positions whose
target distribution is needed, H hidden size, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.drafts._attention import Seen, attend, divide
from stages.drafts._layout import Layout, cut, lay_out
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


def kept_or_made_again(draft: Eagle3, made: Callable[..., Any], *args: Any) -> Any:
    """made(*args); where `draft.recompute_steps`, only tensors among `args` are kept for the way back, and the rest is made again."""
    if not draft.recompute_steps or not torch.is_grad_enabled():
        return made(*args)
    return checkpoint(made, *args, use_reentrant=False, preserve_rng_state=False)  # nothing here is random


def chain_states(
    draft: Eagle3, batch: PackedBatch, layout: Layout, goes_on: Callable[[int, Tensor, Tensor], Tensor] | None = None
) -> list[Tensor]:
    """h [N, H] (before `norm`) of every step's queries, in the order of `layout.roots`, or of those that `goes_on` leaves: it
    is given a step, its roots and their h, and tells which of them go on.

    A token is fed at several steps and its embedding is always normed alike, so its half of the projections is made once.
    With `draft.recompute_steps` a step leaves its h, key and value behind for the way back, and nothing else.
    """
    attention, c, norm = draft.midlayer.self_attn, draft.config, draft.midlayer.hidden_norm
    D, kv, groups = c.head_dim, c.kv_heads * c.head_dim, (c.heads, c.kv_heads, c.kv_heads)
    halves = [p.weight.split(c.hidden_size, dim=1) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    of_token, of_state = (torch.cat(half) for half in zip(*halves, strict=True))
    keys, roots = layout.keys_K, [r for r in layout.roots if len(r)]
    planned = len(roots)
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
    for step in range(1, planned):
        if goes_on:
            layout = cut(layout, batch.lengths, step - 1, goes_on(step - 1, roots[step - 1], found[-1]))
            if not len(layout.roots[step]):
                return found
            roots[step], fed[step] = layout.roots[step], layout.roots[step] + 1 + step
        h, *own = kept_or_made_again(draft, further, step, seen(step), found[-1], *chain)
        found.append(h)
        chain += own
    if goes_on:
        goes_on(planned - 1, roots[-1], found[-1])
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
        tried: roots alive, by step; where the teacher's chains are accepted ones, in training, those that got so far.
    """

    loss: Tensor
    roots: Tensor
    drafted: Tensor
    hits: tuple[int, ...]
    tried: tuple[int, ...]


def look_ahead(
    draft: Eagle3, teacher: Teacher, batch: PackedBatch, steps: int, decay: float, *, roots_in_all: int | None = None
) -> Ahead:
    """Run `steps` draft steps from every root, fed the row's true tokens, against the target's distributions; where the
    teacher's chains are "accepted" and a gradient is taken, as long as they are the draft's best.

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
    low, device = teacher.products if torch.is_grad_enabled() else None, roots.device.type
    judged: list[_Judged] = []

    def judge(first: int, alive: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        judged.append(_judge(draft, teacher, batch, alive, states, first, weights, low))

    def goes_on(step: int, alive: Tensor, h: Tensor) -> Tensor:
        with torch.autocast(device, enabled=False):
            judge(step, [alive], [h])
        return judged[-1].best == judged[-1].own

    follow = goes_on if teacher.chains == "accepted" and torch.is_grad_enabled() else None
    with torch.autocast(device, dtype=low or torch.bfloat16, enabled=low not in (None, draft.fc.weight.dtype)):
        states = chain_states(draft, batch, layout, follow)
    if not follow:
        judge(0, layout.roots[: len(states)], states)
    hits, tried = [0] * steps, [0] * steps
    for found in judged:
        for i, part in enumerate(found.slices, found.first):
            drafted[torch.searchsorted(roots, found.alive[i - found.first]), i] = found.best[part]
            hits[i], tried[i] = int((found.best[part] == found.own[part]).sum()), part.stop - part.start
    loss = judged[0].loss if len(judged) == 1 else torch.stack([found.loss for found in judged]).sum()
    return Ahead(loss, roots, drafted, tuple(hits), tuple(tried))


@dataclass(frozen=True)
class _Judged:
    """What came of the queries of some steps, from step `first`: their part of the loss, the best target id and the row's own
    of each, and where each step's are."""

    loss: Tensor
    first: int
    alive: Sequence[Tensor]
    slices: tuple[slice, ...]
    best: Tensor
    own: Tensor


def _judge(
    draft: Eagle3,
    teacher: Teacher,
    batch: PackedBatch,
    alive: Sequence[Tensor],
    states: Sequence[Tensor],
    first: int,
    weights: Sequence[float],
    low: torch.dtype | None,
) -> _Judged:
    """Hold the states of steps `first` and further, at their roots `alive`, to the target's distributions."""
    predicted = torch.cat([r + 1 + i for i, r in enumerate(alive, first)])
    needed = torch.unique(predicted)
    own = batch.input_ids[predicted + 1]
    sizes = [len(r) for r in alive]
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    slices = tuple(slice(a, b) for a, b in itertools.pairwise(edges))
    label = teacher.draft_id[own]
    scaled = zip(sizes, weights[first:], strict=False)
    scale = torch.cat([batch.last.new_full((n,), w) for n, w in scaled]) * (label >= 0)
    asked = Queries(slices, torch.searchsorted(needed, predicted), label, scale)
    x, last = torch.cat([kept_or_made_again(draft, draft.norm, h) for h in states]), batch.last[needed]
    loss, _, best = head_loss(x, draft.lm_head.weight, last, teacher, asked, low)
    return _Judged(loss, first, alive, slices, torch.where(best < 0, -1, teacher.target_ids[best]), own)
