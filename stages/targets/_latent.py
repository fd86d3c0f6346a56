"""DeepSeek-V3's layer: multi-head latent attention, and a mixture of experts beside shared ones. Kimi-K2 and K2.5 share it.

Written after the published architecture; transformers' deepseek_v3 is what the tests hold it to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.contracts.errors import EngineError
from stages.targets._checkpoint import Checkpoint, assemble, demand_plain, eos_of, read_gated
from stages.targets._decoder import Decoder, DecoderConfig
from stages.targets._layers import Layer, Linear
from stages.targets._mixture import read_mixture
from stages.targets._rope import read_rope, rotate, rotate_neighbours, yarn_mscale

_NEEDED = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace", "n_routed_experts"),
    *("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor"),
)
_LATENT_EPS = 1e-6  # of the norms of the latents, whatever rms_norm_eps says


@dataclass
class LatentAttention:
    """query: one product, or two with a norm between; kv_a gives the latent and one rotary key for all heads."""

    query: tuple[Linear, Tensor, Linear] | tuple[Linear]
    kv_a: Linear
    kv_norm: Tensor
    kv_b: Linear
    out: Linear
    heads: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    neighbours: bool

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turn = rotate_neighbours if self.neighbours else rotate
        q = self._queries(h).view(-1, self.heads, self.plain_dim + self.rope_dim)
        q_plain, q_turned = q.split((self.plain_dim, self.rope_dim), -1)
        latent, k_turned = self.kv_a(h).split((self.kv_norm.shape[0], self.rope_dim), -1)
        kv = self.kv_b(_norm(latent, self.kv_norm)).view(-1, self.heads, self.plain_dim + self.value_dim)
        k_plain, v = kv.split((self.plain_dim, self.value_dim), -1)
        k_turned = turn(k_turned[:, None], cos, sin).expand(-1, self.heads, -1)
        return (
            torch.cat([q_plain, turn(q_turned, cos, sin)], -1),
            torch.cat([k_plain, k_turned], -1),
            v,
        )

    @property
    def qkv(self) -> None:
        return None

    def _queries(self, h: Tensor) -> Tensor:
        if len(self.query) == 1:
            return self.query[0](h)
        down, norm, up = self.query
        return up(_norm(down(h), norm))

    def pack(self) -> None:
        for linear in (*(p for p in self.query if isinstance(p, Linear)), self.kv_a, self.kv_b, self.out):
            linear.pack()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, _LATENT_EPS)


def read_latent_config(folder: Path, config: Mapping[str, Any]) -> DecoderConfig:
    """config.json of a DeepSeek-V3-like model, or the text_config in it.

    Raises:
        EngineError: something in it that is not computed here.
    """
    demand_plain(config)
    for key, here in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.get(key, here) != here:
            raise EngineError(
                "This kind of mixture of experts is not computed here",
                where=f"config.json: {key}",
                expected=str(here),
                got=str(config[key]),
                do="extract with engine sglang, or add it to stages/targets/_latent.py",
            )
    for key in _NEEDED:
        if key not in config:
            raise EngineError(
                "config.json does not say all that this family needs",
                where="config.json",
                expected=key,
                got=", ".join(sorted(config)),
                do="use the config.json that came with the weights",
            )
    kind, theta, figures = read_rope(config)
    heads, head_dim = config["num_attention_heads"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    scale = head_dim**-0.5
    if kind != "default" and (mscale := figures.get("mscale_all_dim")):
        scale *= yarn_mscale(figures["factor"], mscale) ** 2
    return DecoderConfig(
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        vocab_size=config["vocab_size"],
        eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_positions=config.get("max_position_embeddings", 4096),
        eos_ids=eos_of(folder, config),
        bos_id=config.get("bos_token_id"),
        rope_scaling=figures,
        rope_kind=kind,
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        scale=scale,
    )


def read_latent_layer(tensor: Checkpoint, config: Mapping[str, Any], c: DecoderConfig, i: int) -> Layer:
    """Layer `i`: dense below first_k_dense_replace, a mixture from there on."""
    at = f"model.layers.{i}."
    if i < config["first_k_dense_replace"]:
        mlp = read_gated(tensor, at + "mlp.", config["intermediate_size"], c.hidden_size)
    else:
        mlp = read_mixture(tensor, at + "mlp.", config, c.hidden_size)
    return Layer(
        input_norm=tensor(at + "input_layernorm.weight", c.hidden_size),
        attention=_attention(tensor, at + "self_attn.", config, c),
        post_norm=tensor(at + "post_attention_layernorm.weight", c.hidden_size),
        mlp=mlp,
    )


def _attention(tensor: Checkpoint, at: str, config: Mapping[str, Any], c: DecoderConfig) -> LatentAttention:
    H, latent, rank = c.hidden_size, config["kv_lora_rank"], config.get("q_lora_rank")
    plain, rope, value = config["qk_nope_head_dim"], c.rope_dim, c.value_dim
    if rank is None:
        query = (Linear(tensor(at + "q_proj.weight", c.heads * c.head_dim, H)),)
    else:
        query = (
            Linear(tensor(at + "q_a_proj.weight", rank, H)),
            tensor(at + "q_a_layernorm.weight", rank),
            Linear(tensor(at + "q_b_proj.weight", c.heads * c.head_dim, rank)),
        )
    return LatentAttention(
        query=query,
        kv_a=Linear(tensor(at + "kv_a_proj_with_mqa.weight", latent + rope, H)),
        kv_norm=tensor(at + "kv_a_layernorm.weight", latent),
        kv_b=Linear(tensor(at + "kv_b_proj.weight", c.heads * (plain + value), latent)),
        out=Linear(tensor(at + "o_proj.weight", H, c.heads * value)),
        heads=c.heads,
        plain_dim=plain,
        rope_dim=rope,
        value_dim=value,
        neighbours=config.get("rope_interleave", True),
    )


def read_latent_decoder(
    folder: Path, config: Mapping[str, Any], device: str, dtype: str, *, stored: bool = False
) -> Decoder:
    """A Decoder from DeepSeek-V3's tensor names."""
    c = read_latent_config(folder, config)
    tensor = Checkpoint(folder, device, getattr(torch, dtype), stored=stored, config=config)
    tied = bool(config.get("tie_word_embeddings"))
    return assemble(tensor, c, lambda i: read_latent_layer(tensor, config, c, i), tied=tied)
