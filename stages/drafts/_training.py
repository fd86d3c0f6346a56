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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.drafts._loss import Teacher, soft_label_loss
from stages.drafts._module import Eagle3, rotary, rotate


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


def attend(
    q_NHD: Tensor, k_KHD: Tensor, v_KHD: Tensor, chain: Sequence[tuple[Tensor, Tensor]], layout: Layout, step: int
) -> Tensor:
    """Heads' outputs [N, heads, D]: each query over its row's pairs up to its root and its own chain.

    Args:
        q_NHD: rotated queries of this step.
        k_KHD, v_KHD: rotated keys and values of the pairs; fewer heads when grouped.
        chain: keys and values of steps 1..step at these queries, each [N, kv heads, D].
    """
    N, heads, D = q_NHD.shape
    kv = k_KHD.shape[1]
    q = (q_NHD * D**-0.5).view(N, kv, heads // kv, D)
    own = [torch.einsum("nkgd,nkd->kgn", q, k) for k, _ in chain]
    outputs = []
    for span in layout.spans:
        part = span.queries[step]
        n, seen = part.stop - part.start, span.keys.stop - span.keys.start
        if not n:
            continue
        grouped = q[part].permute(1, 2, 0, 3).reshape(kv, -1, D)
        scores = (grouped @ k_KHD[span.keys].permute(1, 2, 0)).view(kv, -1, n, seen)
        key_position = layout.positions_T[layout.keys_K[span.keys]]
        hidden = key_position > layout.positions_T[layout.roots[step][part], None]
        scores = scores.masked_fill(hidden, -torch.inf)
        scores = torch.cat([scores, *(s[:, :, part, None] for s in own)], dim=-1).softmax(dim=-1)
        out = (scores[..., :seen].reshape(kv, -1, seen) @ v_KHD[span.keys].transpose(0, 1)).view(kv, -1, n, D)
        for i, (_, v) in enumerate(chain):
            out = out + scores[..., seen + i, None] * v[part].transpose(0, 1)[:, None]
        outputs.append(out.permute(2, 0, 1, 3).reshape(n, heads, D))
    return torch.cat(outputs)


def chain_states(draft: Eagle3, batch: PackedBatch, layout: Layout) -> Iterator[Tensor]:
    """Yield h [N, H] (before `norm`) of every step's queries, in the order of `layout.roots`."""
    attention, c = draft.midlayer.self_attn, draft.config
    keys = layout.keys_K
    position_K = layout.positions_T[keys]
    g_KH = draft.fuse(batch.aux[keys])
    x = draft.block_input(batch.input_ids[keys + 1], g_KH)
    k_KHD = rotate(attention.heads(attention.k_proj, x), rotary(c, position_K, x))
    v_KHD = attention.heads(attention.v_proj, x)
    at = torch.searchsorted(keys, layout.roots[0])
    q = rotate(attention.heads(attention.q_proj, x[at]), rotary(c, position_K[at], x))
    h = draft.block_output(g_KH[at], attend(q, k_KHD, v_KHD, [], layout, 0))
    yield h
    chain: list[tuple[Tensor, Tensor]] = []
    for step, keep in enumerate(layout.keep, start=1):
        roots = layout.roots[step]
        if not len(roots):
            return
        h = h[keep]
        x = draft.block_input(batch.input_ids[roots + 1 + step], h)
        table = rotary(c, layout.positions_T[roots] + step, x)
        q, k = (rotate(attention.heads(p, x), table) for p in (attention.q_proj, attention.k_proj))
        chain = [(a[keep], b[keep]) for a, b in chain] + [(k, attention.heads(attention.v_proj, x))]
        h = draft.block_output(h, attend(q, k_KHD, v_KHD, chain, layout, step))
        yield h


@dataclass(frozen=True)
class Ahead:
    """What the draft made of a batch.

    Args:
        loss: KL in nats, step weights normalised, mean over the batch's roots; differentiable in training.
        roots: flat index of every root [N].
        drafted: target ids drafted at every step, [N, steps]; -1 where the row's supervised run ends before.
        hits: drafted tokens equal to the row's own, by step.
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
    needed = torch.unique(torch.cat([r + 1 + i for i, r in enumerate(layout.roots)]))
    target_SD, entropy_S = teacher.distributions(batch.last[needed])
    loss, alive = batch.last.new_zeros(()), torch.arange(len(roots), device=roots.device)
    hits, tried = [0] * steps, [0] * steps
    for i, h in enumerate(chain_states(draft, batch, layout)):
        alive = alive if i == 0 else alive[layout.keep[i - 1]]
        own = batch.input_ids[layout.roots[i] + 2 + i]
        scale = (teacher.draft_id[own] >= 0).to(h.dtype) * weights[i]
        at = torch.searchsorted(needed, layout.roots[i] + 1 + i)
        step_loss, _, best = soft_label_loss(draft.norm(h), draft.lm_head.weight, target_SD, entropy_S, at, scale)
        loss = loss + step_loss
        drafted[alive, i] = teacher.target_ids[best]
        hits[i], tried[i] = int((drafted[alive, i] == own).sum()), len(own)
    return Ahead(loss, roots, drafted, tuple(hits), tuple(tried))
