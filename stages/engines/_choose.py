"""Choosing tokens: greedy, sampled, and verification of a drafted chain that leaves the target's distribution as it is.

Shapes: B requests, k drafted tokens, V target vocabulary, D draft vocabulary. A greedy request's distribution is one-hot,
so that greedy and sampled requests share a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def distribution(logits: Tensor, temperature_B: Tensor) -> Tensor:
    """softmax(logits / temperature) in float64, one-hot at the argmax where the temperature is 0; logits [B, ..., V]."""
    shape = (-1, *[1] * (logits.dim() - 1))
    greedy = (temperature_B == 0).view(shape)
    warm = torch.softmax(logits.double() / temperature_B.double().clamp(min=1e-6).view(shape), dim=-1)
    if not bool(greedy.any()):
        return warm
    cold = torch.zeros_like(warm).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy, cold, warm)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index drawn from unnormalised `weights` [B, V] by inverse distribution function, with uniform [B] in [0, 1)."""
    running = weights.cumsum(-1)
    at = torch.searchsorted(running, (uniform[:, None] * running[:, -1:]), right=True)[:, 0]
    # A product rounded up to the total would fall behind the last index that has weight.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(at, last)


def verify_greedy(logits: Tensor, drafted_Bk: Tensor) -> tuple[Tensor, Tensor]:
    """Longest prefix of the draft that equals the target's own choice, and the choice after it.

    Args:
        logits: [B, k+1, V] of the target at the last token and the k drafted ones.

    Returns:
        emitted [B, k+1] (valid up to and with the accepted count), accepted count [B].
    """
    best = logits.argmax(-1)
    accepted = (best[:, :-1] == drafted_Bk).long().cumprod(1).sum(1)
    return best, accepted


def verify_sampled(
    p: Tensor, drafted_Bk: Tensor, draft_index_Bk: Tensor, q: Tensor, target_ids: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): every emitted token follows the target's distribution.

    A drafted token x is kept with probability min(1, p(x) / q(x)); at the first one refused a token is drawn from
    max(0, p - q), and after a wholly kept draft from p.

    Args:
        p: [B, k+1, V] of the target.
        drafted_Bk: drafted target ids; draft_index_Bk: the same as draft ids.
        q: [B, k, D] the distributions that the drafted tokens were drawn from.
        target_ids: [D] target id of each draft id.
        uniform: [B, k+1]: k for keeping, the last for drawing.
    """
    B, k = drafted_Bk.shape
    p_x = p[:, :k].gather(-1, drafted_Bk[..., None])[..., 0]
    q_x = q.gather(-1, draft_index_Bk[..., None])[..., 0]
    accepted = (uniform[:, :k] * q_x < p_x).long().cumprod(1).sum(1)
    row = torch.arange(B, device=p.device)
    rest = p[row, accepted]
    refused = accepted < k
    taken = q[row, accepted.clamp(max=k - 1)] * refused[:, None]
    rest = rest.index_add(1, target_ids, taken, alpha=-1.0).clamp_(min=0.0)
    # p == q leaves nothing but rounding; then p itself is the residual's limit.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[row, accepted])
    emitted = torch.cat([drafted_Bk, drafted_Bk[:, :1]], dim=1)
    emitted[row, accepted] = draw(rest, uniform[:, k])
    return emitted, accepted
