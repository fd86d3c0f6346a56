"""The loss over the draft vocabulary, of all draft steps at once, with the head and its gradient in pieces.

Target distributions are made for a piece of positions, used by every step's queries that predict there, and thrown away:
neither [positions, D] nor [queries, D] is ever whole. A logit's gradient is taken while the logits are at hand.

    kl   KL(p || q)                          q - p
    ce   -log q[token]                       q - 1[token]: the row's own token, no pass of the target's head
    lk   w KL + (1 - w)(1 - a), w = e^(-3a)  w (q - p) - (1 - w) q (1[q<p] - sum of q where q<p)

p the target's, q the draft's distribution, both over the draft vocabulary; a = sum of min(p, q), the share of sampled drafts
that would be accepted; w counts as a constant. lk is the hybrid loss of "LK Losses: Direct Acceptance Rate Optimization for
Speculative Decoding" (arXiv 2602.23881) with its eta of 3. For greedy serving kl did better at equal time on the default
target (benchmarks/training_race.py, 120 CPU-s, one seed: accept length 1.570, lk 1.527).

Shape suffixes: N queries of all steps, S positions to be predicted, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.drafts._products import filled_up, in_rows, lowered

Loss = Literal["kl", "ce", "lk"]
Chains = Literal["all", "accepted"]
_PIECE = 256  # positions at once: [256, 8192] float32 is 8 MB
_ETA = 3.0


class Teacher:
    """The target's head, cut to the draft vocabulary: distributions from stored last states (before the final norm).

    Args:
        norm: weight of the target's final norm [H].
        head: rows of the target's lm_head for the draft vocabulary [D, H], in draft id order.
        eps: of the norm.
        target_ids: target id of every draft id, i64 [D].
        vocab_size: V of the target.
        loss: what the draft is to lower.
        products: dtype of the matrix products while a gradient is taken, with float32 weights beside; None as the weights.
        chains: how far training follows a chain: all of it, or while the row's token was the draft's best (_training.py).
    """

    def __init__(
        self,
        norm: Tensor,
        head: Tensor,
        eps: float,
        target_ids: Tensor,
        vocab_size: int,
        loss: Loss = "kl",
        products: torch.dtype | None = None,
        chains: Chains = "all",
    ) -> None:
        self.norm, self.head, self.eps = norm, head, eps
        self.loss: Loss = loss
        self.chains: Chains = chains
        self.products = products
        self.target_ids = target_ids
        self.draft_id = target_ids.new_full((vocab_size,), -1)
        self.draft_id[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
        self._heads = {head.dtype: head}

    def head_in(self, dtype: torch.dtype) -> Tensor:
        """The head in this dtype; kept."""
        if dtype not in self._heads:
            self._heads[dtype] = self.head.to(dtype)
        return self._heads[dtype]

    @torch.no_grad()
    def distributions(self, last_SH: Tensor, products: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """softmax over the draft vocabulary of the target's own logits [S, D], and its entropy in nats [S]."""
        normed = F.rms_norm(last_SH, self.norm.shape, self.norm, self.eps)
        low = products or last_SH.dtype
        rows = in_rows(normed, low) if low == torch.bfloat16 else normed
        z = (rows @ self.head_in(low).T)[: len(last_SH)]
        p = z.softmax(dim=-1)
        return p, _log_sum(z, p)[0] - torch.linalg.vecdot(p, z).to(last_SH.dtype)


def _log_sum(z: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """log of the sum of exp(z), and the highest z; q is z's softmax. An eighth of the time of torch.logsumexp."""
    top = z.amax(dim=-1).double()
    return (top - q.amax(dim=-1).double().log()).to(_exact(z)), top.to(z.dtype)


def _exact(z: Tensor) -> torch.dtype:
    return torch.float64 if z.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Queries:
    """What every query is asked; step i's queries are `slices[i]`, ascending in `at` within each.

    Args:
        at: which of the positions it predicts [N].
        label: the draft id of the row's own token, -1 where that lies outside the draft vocabulary [N].
        scale: its weight [N]; 0 leaves it out.
    """

    slices: tuple[slice, ...]
    at: Tensor
    label: Tensor
    scale: Tensor

    def pieces(self, positions: int) -> Iterator[tuple[slice, list[tuple[slice, slice | Tensor]]]]:
        """Pieces of the positions, each with the queries that predict there, by step, and where in the piece they do:
        a slice as long as none is left out between them."""
        at = self.at.tolist()
        for start in range(0, positions, _PIECE):
            stop, parts = min(positions, start + _PIECE), []
            for s in self.slices:
                first, last = (bisect.bisect_left(at, edge, s.start, s.stop) for edge in (start, stop))
                if first == last:
                    continue
                inside = slice(at[first] - start, at[last - 1] + 1 - start)
                whole = inside.stop - inside.start == last - first
                parts.append((slice(first, last), inside if whole else self.at[first:last] - start))
            yield slice(start, stop), parts


def _turn_to_gradient(
    z: Tensor, q: Tensor, label: Tensor, p: Tensor | None, entropy: Tensor | None, kind: Loss
) -> tuple[Tensor, Tensor]:
    """Leave the gradient of every query's loss to its logits z [n, D] in q; return the losses [n] and the hits [n]."""
    expected = None if p is None else torch.linalg.vecdot(p, z)
    torch.softmax(z, dim=-1, out=q)
    total, top = _log_sum(z, q)
    own = label.clamp(min=0)[:, None]
    own_z = z.gather(1, own)[:, 0]
    hit = (label >= 0) & (own_z >= top)
    if kind == "ce":
        q.scatter_add_(1, own, torch.full_like(own, -1, dtype=q.dtype))
        return total - own_z, hit
    assert p is not None and expected is not None and entropy is not None
    kl = total - expected - entropy
    if kind == "kl":
        q.sub_(p)
        return kl, hit
    rate = torch.minimum(p, q).sum(dim=-1, keepdim=True)
    pulled = q * (q < p)
    gain = pulled - q * pulled.sum(dim=-1, keepdim=True)
    weight = torch.exp(-_ETA * rate)
    q.sub_(p).mul_(weight).sub_(gain.mul_(1 - weight))
    return (weight * kl[:, None] + (1 - weight) * (1 - rate))[:, 0], hit


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, last: Tensor, teacher: Teacher, asked: Queries, low: torch.dtype, learn: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = teacher.loss
        need_x, need_head = (learn and need for need in ctx.needs_input_grad[:2])
        rows = filled_up if low == torch.bfloat16 else int
        x_low, head_low = x.new_zeros(len(x) + rows(1), x.shape[1], dtype=low), lowered(head, low)
        x_low[: len(x)] = x
        grad_x = torch.empty_like(x) if need_x else None
        grad_head = torch.zeros_like(head) if need_head else None
        loss_N, best_N = x.new_zeros(len(x)), torch.full_like(asked.label, -1)
        rooms = x_low.new_empty(2, rows(min(_PIECE, len(last))), len(head))
        for positions, parts in asked.pieces(len(last)):
            p, entropy = (None, None) if kind == "ce" else teacher.distributions(last[positions], low)
            for part, inside in parts:
                n = part.stop - part.start
                # Rows filled up are other queries': what comes of them is not looked at, and adds nothing.
                x_rows, (z_rows, q_rows) = x_low[part.start : part.start + rows(n)], rooms[:, : rows(n)]
                torch.mm(x_rows, head_low.T, out=z_rows)
                z, q = z_rows[:n], q_rows[:n]
                here = (None, None) if p is None or entropy is None else (p[inside], entropy[inside])
                loss_N[part], hit = _turn_to_gradient(z, q, label := asked.label[part], *here, kind)
                best_N[part] = torch.where(hit, label, -1) if learn else z.argmax(dim=-1)
                scale = asked.scale[part, None]
                if grad_x is not None:
                    grad_x[part] = (q_rows @ head_low)[:n] * scale
                if grad_head is not None:
                    q_rows[n:] = 0
                    q.mul_(scale)
                    grad_head += q_rows.T @ x_rows
        ctx.save_for_backward(grad_x, grad_head)
        ctx.mark_non_differentiable(loss_N, best_N)
        return (loss_N * asked.scale).sum(), loss_N, best_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_head = ctx.saved_tensors
        inputs = (None if g is None else g * grads[0] for g in (grad_x, grad_head))
        return (*inputs, None, None, None, None, None)


def head_loss(
    x_NH: Tensor,
    head_DH: Tensor,
    last_SH: Tensor,
    teacher: Teacher,
    asked: Queries,
    products: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of every query, scaled and summed.

    Args:
        x_NH: normed draft states of all steps.
        head_DH: the draft's lm_head.
        last_SH: the target's last states at the positions to be predicted.
        asked: which position, which token, what weight.
        products: dtype of the products with either head and of the distributions; None as x.

    Returns:
        The scaled sum (differentiable in x and head), the loss of each query in nats, and each query's best draft id; while
        a gradient is taken, -1 stands for any best id but the row's own.
    """
    learn = torch.is_grad_enabled() and (x_NH.requires_grad or head_DH.requires_grad)
    return _HeadLoss.apply(x_NH, head_DH, last_SH, teacher, asked, products or x_NH.dtype, learn)  # type: ignore[no-any-return]
