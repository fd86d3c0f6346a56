"""Where training starts: as much of the target as fits, for the data is small and the target knows the language."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stages.drafts._module import Eagle3

_SCALE = 0.02


@dataclass(frozen=True)
class Donor:
    """Plain tensors of the target. `head` [D, H] are its lm_head's rows for the draft vocabulary, in draft id order; the
    rest is its last decoder layer and final norm; qkv [(heads + 2·kv heads)·D, H], gate_up [2·I, H]."""

    heads: int
    kv_heads: int
    head_dim: int
    head: Tensor
    norm: Tensor
    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@torch.no_grad()
def initialise(draft: Eagle3, donor: Donor, seed: int, variant: str = "layer") -> None:
    """Fill the draft's parameters, deterministically.

    Head and final norm are the target's. g starts as the high point's state (fc is the identity on slot 2, small noise
    elsewhere); the layer starts as the target's last, where the sizes agree, reading g alone: the half that reads the
    token's embedding starts small. What does not fit starts as small noise.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=_SCALE, generator=generator)
    draft.lm_head.weight.copy_(donor.head)
    draft.norm.weight.copy_(donor.norm)
    c, layer = draft.config, draft.midlayer
    H = c.hidden_size
    if "fc" in variant or variant == "layer":
        draft.fc.weight.mul_(0.1)
        draft.fc.weight[:, 2 * H :] += torch.eye(H)
    if variant == "fc":
        return
    if variant == "head":
        return
    layer.hidden_norm.weight.copy_(donor.input_norm)
    layer.post_attention_layernorm.weight.copy_(donor.post_norm)
    if (c.heads, c.kv_heads, c.head_dim) == (donor.heads, donor.kv_heads, donor.head_dim):
        parts = donor.qkv.split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)])
        for name, part in zip("qkv", parts, strict=True):
            getattr(layer.self_attn, f"{name}_proj").weight[:, H:] = part
        layer.self_attn.o_proj.weight.copy_(donor.out)
    if donor.down.shape == layer.mlp.down_proj.weight.shape:
        for linear, part in zip((layer.mlp.gate_proj, layer.mlp.up_proj), donor.gate_up.chunk(2), strict=True):
            linear.weight.copy_(part)
        layer.mlp.down_proj.weight.copy_(donor.down)
