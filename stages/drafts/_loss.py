"""Soft labels over the draft vocabulary, with the head and its gradient in pieces that stay in the caches.

Shape suffixes: N queries, S positions whose target distribution is needed, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PIECE = 256  # queries at once: [256, 8192] float32 is 8 MB


class Teacher:
    """The target's head, cut to the draft vocabulary: distributions from stored last states (before the final norm).

    Args:
        norm: weight of the target's final norm [H].
        head: rows of the target's lm_head for the draft vocabulary [D, H], in draft id order.
        eps: of the norm.
        target_ids: target id of every draft id, i64 [D].
        vocab_size: V of the target.
    """

    def __init__(self, norm: Tensor, head: Tensor, eps: float, target_ids: Tensor, vocab_size: int) -> None:
        self.norm, self.head, self.eps = norm, head, eps
        self.target_ids = target_ids
        self.draft_id = target_ids.new_full((vocab_size,), -1)
        self.draft_id[target_ids] = torch.arange(len(target_ids), device=target_ids.device)

    @torch.no_grad()
    def distributions(self, last_SH: Tensor) -> tuple[Tensor, Tensor]:
        """softmax over the draft vocabulary of the target's own logits [S, D], and its entropy in nats [S]."""
        target_SD = last_SH.new_empty(len(last_SH), len(self.head))
        entropy_S = last_SH.new_empty(len(last_SH))
        for at in range(0, len(last_SH), _PIECE):
            piece = slice(at, at + _PIECE)
            z = F.rms_norm(last_SH[piece], self.norm.shape, self.norm, self.eps) @ self.head.T
            z -= z.max(dim=-1, keepdim=True).values
            p = torch.exp(z, out=target_SD[piece])
            total = p.sum(dim=-1)
            p /= total[:, None]
            entropy_S[piece] = total.log() - torch.linalg.vecdot(p, z)
        return target_SD, entropy_S


class _SoftLabelLoss(torch.autograd.Function):
    """sum over n of scale[n] · KL(target || draft). The logits' gradient, scale · (draft - target), is taken while the
    logits are at hand, so that [N, D] is never kept for the way back."""

    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, head_DH: Tensor, target_SD: Tensor, entropy_S: Tensor, at_N: Tensor, scale_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        need_x, need_head = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_NH) if need_x else None
        grad_head = torch.zeros_like(head_DH) if need_head else None
        loss_N = x_NH.new_empty(len(x_NH))
        best_N = at_N.new_empty(len(x_NH))
        for start in range(0, len(x_NH), _PIECE):
            piece = slice(start, start + _PIECE)
            x, p = x_NH[piece], target_SD[at_N[piece]]
            z = x @ head_DH.T
            top, best_N[piece] = z.max(dim=-1)
            z -= top[:, None]
            expected = torch.linalg.vecdot(p, z)
            z.exp_()
            total = z.sum(dim=-1)
            loss_N[piece] = total.log() - expected - entropy_S[at_N[piece]]
            if grad_x is None:
                continue
            z.div_(total[:, None]).sub_(p).mul_(scale_N[piece, None])
            torch.mm(z, head_DH, out=grad_x[piece])
            if grad_head is not None:
                grad_head.addmm_(z.T, x)
        ctx.save_for_backward(grad_x, grad_head)
        ctx.mark_non_differentiable(loss_N, best_N)
        return (loss_N * scale_N).sum(), loss_N, best_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_head = ctx.saved_tensors
        grad = grads[0]
        inputs = (None if g is None else g * grad for g in (grad_x, grad_head))
        return (*inputs, None, None, None, None)


def soft_label_loss(
    x_NH: Tensor, head_DH: Tensor, target_SD: Tensor, entropy_S: Tensor, at_N: Tensor, scale_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(target || draft) of every query, scaled and summed.

    Args:
        x_NH: normed draft states.
        head_DH: the draft's lm_head.
        target_SD, entropy_S: target distributions, as Teacher.distributions gives them.
        at_N: row of target_SD that each query is to match.
        scale_N: weight of each query; 0 leaves it out.

    Returns:
        The scaled sum (differentiable in x and head), the KL of each query in nats, and each query's best draft id.
    """
    return _SoftLabelLoss.apply(x_NH, head_DH, target_SD, entropy_S, at_N, scale_N)  # type: ignore[no-any-return]
