"""Rotary positions: the angles that a target's config.json asks for, and how pairs are turned by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stages.contracts.errors import EngineError

KINDS = ("default", "llama3", "yarn")


def read_rope(config: Mapping[str, Any]) -> tuple[str, float, dict[str, float]]:
    """Kind, base and the figures of the scaling, from config.json.

    Raises:
        EngineError: a scaling that is not computed here.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise EngineError(
            f"RoPE scaling {kind!r} is not computed here",
            where="config.json",
            expected=", ".join(KINDS),
            got=str(rope),
            do="extract with engine sglang, or add it to stages/targets/_rope.py",
        )
    theta = float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    figures = {k: float(v) for k, v in rope.items() if isinstance(v, int | float)} if kind != "default" else {}
    if kind == "yarn":
        figures.setdefault("original_max_position_embeddings", float(config.get("max_position_embeddings", 2048)))
    return kind, theta, figures


def rope_table(
    dim: int, theta: float, kind: str, scaling: Mapping[str, float], positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, dim], float32, each half the other's copy; scalings as transformers computes them."""
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, device=device).float() / dim)
    loudness = 1.0
    if kind == "llama3":
        inverse = _llama3(inverse, scaling)
    if kind == "yarn":
        inverse, loudness = _yarn(inverse, dim, theta, scaling), _loudness(scaling)
    angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * loudness, angles.sin() * loudness


def _llama3(inverse: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Slow turns divided by `factor`, fast ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / factor + smooth * inverse


def _yarn(inverse: Tensor, dim: int, theta: float, scaling: Mapping[str, float]) -> Tensor:
    """As above, but blended over the pairs that turn between `beta_slow` and `beta_fast` times in the original length."""
    original = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.get("beta_fast") or 32.0), pair_that_turns(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    steps = torch.arange(dim // 2, device=inverse.device, dtype=torch.float32)
    slow = ((steps - low) / (high - low or 1e-3)).clamp(0, 1)
    return inverse / scaling["factor"] * slow + inverse * (1 - slow)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's correction for attention that grows flat in longer contexts."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _loudness(scaling: Mapping[str, float]) -> float:
    """What cos and sin are multiplied by."""
    if given := scaling.get("attention_factor"):
        return given
    one, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if one and all_dim:
        return yarn_mscale(scaling["factor"], one) / yarn_mscale(scaling["factor"], all_dim)
    return yarn_mscale(scaling["factor"], 1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split convention; x [..., D] with cos and sin broadcast to it."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rotate` for weights whose pairs lie side by side (DeepSeek's); the result has them split into halves."""
    return rotate(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), cos, sin)
