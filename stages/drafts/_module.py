"""EAGLE-3: one decoder layer that drafts from a target's residual stream at three points.

A row and what the draft makes of it (x: token embedded, g: fused states, y: what it predicts), position p from the left:

    tokens   t0   t1   t2   t3   t4        g[p] = fc(states of the target at position p, three points)
    input         x1   x2   x3             x[p+1] = embedding of t[p+1]
    states        g0   g1   g2
    predicts      y2   y3   y4             y[p+2] = logits for t[p+2], over the draft vocabulary

Pair p sits at rotary position p. A further draft step takes its own h (before `norm`) for g and the next token for x.
EAGLE-3.1 adds norms, each an option: `fc_norm` (an RMSNorm of each of the three states before fc) or `norm_before_fc` (one of
all 3H values, `input_norm`), and `norm_output`: a further step takes h after `norm`. Sources: SGLang 0.5.23 and vLLM, models/llama_eagle3.py; speculators
0.9.0, models/eagle3/core.py.
Parameter names are those of the export, which are SGLang's. Shape suffixes: N positions, H hidden size, D head size,
V target vocabulary; the draft vocabulary is called so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.contracts.draft import DraftNorm
from stages.drafts._products import Linear


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of a draft. Rotary positions are plain (`rope_theta`, no scaling), so drafts of scaled targets say so too."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    eps: float
    rope_theta: float
    max_positions: int
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    norms: tuple[DraftNorm, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the export by name, with its shape."""
        H, I = self.hidden_size, self.intermediate_size
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        block = {
            "hidden_norm": (H,),
            "input_layernorm": (H,),
            "post_attention_layernorm": (H,),
            "self_attn.q_proj": (q, 2 * H),
            "self_attn.k_proj": (kv, 2 * H),
            "self_attn.v_proj": (kv, 2 * H),
            "self_attn.o_proj": (H, q),
            "mlp.gate_proj": (I, H),
            "mlp.up_proj": (I, H),
            "mlp.down_proj": (H, I),
        }
        outside = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (self.draft_vocab_size, H)}
        if "fc_norm" in self.norms:
            outside |= {f"fc_norm.{i}.weight": (H,) for i in range(3)}
        if "norm_before_fc" in self.norms:
            outside["input_norm.weight"] = (3 * H,)
        return outside | {f"midlayer.{name}.weight": shape for name, shape in block.items()}


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """The projections alone: who attends to what differs between training (packed rows) and serving (caches)."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(2 * c.hidden_size, c.heads * c.head_dim)
        self.k_proj = Linear(2 * c.hidden_size, c.kv_heads * c.head_dim)
        self.v_proj = Linear(2 * c.hidden_size, c.kv_heads * c.head_dim)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden_size)

    def heads(self, projection: Linear, x: Tensor) -> Tensor:
        """[N, heads of the projection, D]."""
        return projection(x).view(x.shape[0], -1, self.head_dim)


class Mlp(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Midlayer(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm = Norm(c.hidden_size, c.eps)
        self.input_layernorm = Norm(c.hidden_size, c.eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.eps)
        self.mlp = Mlp(c)


class Eagle3(nn.Module):
    """The draft. `embedding` [V, H] is the target's: frozen, and no parameter.

    recompute_steps: training keeps little of a draft step for the way back and makes the rest again (_training.py).
    """

    embedding: Tensor
    recompute_steps = False

    def __init__(self, config: Eagle3Config, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        H, norms = config.hidden_size, config.norms
        self.input_norm = Norm(3 * H, config.eps) if "norm_before_fc" in norms else None
        self.fc_norm = nn.ModuleList([Norm(H, config.eps) for _ in range(3)]) if "fc_norm" in norms else None
        self.fc = Linear(3 * H, H)
        self.midlayer = Midlayer(config)
        self.norm = Norm(config.hidden_size, config.eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)
        self.register_buffer("embedding", embedding, persistent=False)

    def fuse(self, aux: Tensor) -> Tensor:
        """g [..., H] from the states at the three points, ascending, concatenated [..., 3H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            chunks = zip(self.fc_norm, aux.chunk(3, dim=-1), strict=True)
            aux = torch.cat([norm(state) for norm, state in chunks], dim=-1)
        return self.fc(aux)

    def block_input(self, tokens: Tensor, g: Tensor) -> Tensor:
        """x [N, 2H]: the normed embedding of `tokens` [N], then the normed g [N, H]."""
        embedded = F.embedding(tokens, self.embedding)
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(g)], dim=-1)

    def block_output(self, g: Tensor, attended: Tensor) -> Tensor:
        """h [N, H] before `norm`, from the un-normed g and the heads' outputs [N, heads, D]."""
        h = g + self.midlayer.self_attn.o_proj(attended.flatten(1))
        return h + self.midlayer.mlp(self.midlayer.post_attention_layernorm(h))

    def handed_on(self, h: Tensor) -> Tensor:
        """g [..., H] of the next draft step, from this one's h before `norm`."""
        return self.norm(h) if "norm_output" in self.config.norms else h

    def draft_logits(self, h: Tensor) -> Tensor:
        """[..., draft vocabulary]."""
        return self.lm_head(self.norm(h))


def rotary(config: Eagle3Config, positions_N: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 1, D] at the positions, for `rotate`."""
    even = torch.arange(0, config.head_dim, 2, device=positions_N.device).float()
    inverse = 1.0 / config.rope_theta ** (even / config.head_dim)
    angles = torch.outer(positions_N.float(), inverse)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, half-split convention; x [N, heads, D]."""
    half = x.shape[-1] // 2
    return x * table[0] + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * table[1]
