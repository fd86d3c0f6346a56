"""DeepSeek-V3's mixture of experts. E experts, k of them a token.

Experts are asked for one at a time and only those that a token is routed to, so that a stored target (StoredParts) reads no
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.targets._checkpoint import Checkpoint, read_gated
from stages.targets._layers import GatedMLP, Parts


@dataclass
class Router:
    """weight [E, H] and bias [E], float32: the bias decides who is chosen, not how much each counts."""

    weight: Tensor
    bias: Tensor
    chosen: int
    groups: int
    groups_chosen: int
    normalised: bool
    scale: float

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token [T, k], and their weights [T, k] float32."""
        score_TE = F.linear(h.float(), self.weight).sigmoid()
        wish_TE = score_TE + self.bias
        if self.groups > 1:
            wish_TGE = wish_TE.unflatten(-1, (self.groups, -1))
            best_TG = wish_TGE.topk(2, dim=-1).values.sum(-1)
            kept = best_TG.topk(self.groups_chosen, dim=-1).indices
            open_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, kept, True)
            wish_TE = wish_TGE.masked_fill(~open_TG[..., None], -torch.inf).flatten(-2)
        index_Tk = wish_TE.topk(self.chosen, dim=-1).indices
        weight_Tk = score_TE.gather(1, index_Tk)
        if self.normalised:
            weight_Tk = weight_Tk / (weight_Tk.sum(-1, keepdim=True) + 1e-20)
        return index_Tk, weight_Tk * self.scale


@dataclass
class Mixture:
    """Experts by number, and the shared ones in one."""

    router: Router
    experts: Parts[GatedMLP]
    shared: GatedMLP | None

    def __call__(self, h: Tensor) -> Tensor:
        index_Tk, weight_Tk = self.router(h)
        out = torch.zeros_like(h)
        for e in index_Tk.unique().tolist():
            token, place = torch.where(index_Tk == e)
            part = self.experts[e](h[token]) * weight_Tk[token, place, None]
            out.index_add_(0, token, part.to(out.dtype))
        return out if self.shared is None else out + self.shared(h)

    @property
    def gate_up(self) -> None:
        return None

    @property
    def down(self) -> None:
        return None

    def pack(self) -> None:
        for e in range(len(self.experts)):
            self.experts[e].pack()
        if self.shared is not None:
            self.shared.pack()


def read_mixture(tensor: Checkpoint, at: str, config: Mapping[str, Any], H: int) -> Mixture:
    """The mixture of experts whose names start with `at`."""
    E, inter, shared = config["n_routed_experts"], config["moe_intermediate_size"], config.get("n_shared_experts") or 0
    bias = at + "gate.e_score_correction_bias"
    return Mixture(
        router=Router(
            weight=tensor(at + "gate.weight", E, H, dtype=torch.float32),
            bias=tensor(bias, E, dtype=torch.float32),
            chosen=config["num_experts_per_tok"],
            groups=config.get("n_group") or 1,
            groups_chosen=config.get("topk_group") or 1,
            normalised=config["norm_topk_prob"],
            scale=config["routed_scaling_factor"],
        ),
        experts=tensor.parts(E, lambda e: read_gated(tensor, f"{at}experts.{e}.", inter, H)),
        shared=read_gated(tensor, at + "shared_experts.", inter * shared, H) if shared else None,
    )
