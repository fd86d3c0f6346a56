"""What a decoder is told, what it keeps between calls, and what it leaves. Shape suffixes as in _decoder.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecoderConfig:
    """head_dim is that of queries and keys; value_dim and rope_dim are the same where they are not given. scale: of the
    attention, 1/sqrt(head_dim) where it is not given."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    rope_theta: float
    max_positions: int
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    rope_scaling: dict[str, float] = field(default_factory=dict)
    rope_kind: str = "default"
    rope_dim: int = 0
    value_dim: int = 0
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("rope_dim", "value_dim"):
            object.__setattr__(self, name, getattr(self, name) or self.head_dim)


class KVCache:
    """Keys [layers, slots, K, S, D] and values [layers, slots, K, S, Dv]. A slot holds one request; `lengths` is kept by the caller, so that
    rejecting drafted tokens is nothing but a smaller length."""

    def __init__(self, c: DecoderConfig, slots: int, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (c.layers, slots, c.kv_heads, positions)
        self.keys = torch.zeros(*shape, c.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(*shape, c.value_dim, device=device, dtype=dtype)

    def move(self, source: int, to: int) -> None:
        """Put the request of slot `source` into slot `to`."""
        self.keys[:, to] = self.keys[:, source]
        self.values[:, to] = self.values[:, source]


@dataclass
class Stream:
    """What one forward pass leaves: `last` before the final norm and the states at the points asked for."""

    last: Tensor
    states: dict[int, Tensor]

    def aux(self, points: Sequence[int]) -> Tensor:
        """The states at `points`, concatenated in ascending order, on the last dimension."""
        return torch.cat([self.states[p] for p in sorted(points)], dim=-1)

    def cut(self, start: int, end: int) -> Stream:
        """The part of some of the tokens."""
        return Stream(self.last[start:end], {p: s[start:end] for p, s in self.states.items()})
