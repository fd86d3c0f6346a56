"""The parts of a decoder layer that every family is put together from. Shape suffixes as in _decoder.py; I is the
MLP's width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.targets._rope import rotate

_PACKED_MIN_ROWS = 4  # oneDNN's packed kernels take longer for 1 or 2 rows than for 4
Part = TypeVar("Part", covariant=True)


class Linear:
    """y = x @ weight.T for weight [out, in], optionally in oneDNN's packed layout (CPU, float32, inference only).

    Packing uses private torch operators; where they are missing the plain product is used.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight: Tensor | None = weight
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Replace the weight by its packed form, when this machine can."""
        if self.weight is None or self.weight.device.type != "cpu" or self.weight.dtype != torch.float32:
            return
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            torch.ops.mkldnn._linear_pointwise(self.weight[:4], packed, None, "none", [], "")
        except (AttributeError, RuntimeError, NotImplementedError):
            return
        self._packed, self.weight = packed, None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight)
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        if rows < _PACKED_MIN_ROWS:
            flat = F.pad(flat, (0, 0, 0, _PACKED_MIN_ROWS - rows))
        out = torch.ops.mkldnn._linear_pointwise(flat, self._packed, None, "none", [], "")
        return out[:rows].reshape(*x.shape[:-1], out.shape[-1])


class Parts(Protocol[Part]):
    """Layers or experts by number: a list in memory, or StoredParts, read each time one is asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Part: ...


class Attention(Protocol):
    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, D], keys [T, K, D], turned by cos and sin [T, 1, rotary size], and values [T, K, Dv]."""
        ...

    @property
    def qkv(self) -> Linear | None:
        """The one product that gives queries, keys and values, in families that have one."""
        ...

    @property
    def out(self) -> Linear: ...

    def pack(self) -> None: ...


class FeedForward(Protocol):
    def __call__(self, h: Tensor) -> Tensor: ...

    @property
    def gate_up(self) -> Linear | None:
        """None for a mixture of experts, and so is `down`."""
        ...

    @property
    def down(self) -> Linear | None: ...

    def pack(self) -> None: ...


@dataclass
class Layer:
    """One pre-norm decoder layer; norms [H]."""

    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
    mlp: FeedForward


@dataclass
class GroupedAttention:
    """Llama's. qkv [(heads + 2·kv_heads)·D, H]; q_norm and k_norm [D] are Qwen3's."""

    qkv: Linear
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(h).view(-1, sum(counts), self.head_dim).split(counts, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q = F.rms_norm(q, (self.head_dim,), self.q_norm, self.eps)
            k = F.rms_norm(k, (self.head_dim,), self.k_norm, self.eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def pack(self) -> None:
        self.qkv.pack()
        self.out.pack()


@dataclass
class GatedMLP:
    """gate_up [2·I, H], down [H, I]."""

    gate_up: Linear
    down: Linear

    def __call__(self, h: Tensor) -> Tensor:
        gate, up = self.gate_up(h).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()
