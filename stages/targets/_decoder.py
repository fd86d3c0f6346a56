"""A pre-norm decoder with grouped-query attention: the shape Llama, Qwen3 and many others share.

Written for three uses with one forward: packed rows without padding (extraction, the layer probe), prefill into a cache,
and batched decoding of a few tokens a request (serving). Shape suffixes: T tokens of all rows, B requests, Q new tokens
a request, S positions in the cache, H hidden size, D head size, K key-value heads, G query heads a key-value head.

The residual stream is named by points (stages/contracts/points.py): `states[k]` is the stream after k layers. The last
state is taken *before* the final norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_MIN_ROWS = 4  # oneDNN's packed kernels take longer for 1 or 2 rows than for 4


@dataclass(frozen=True)
class DecoderConfig:
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
        return out[:rows].reshape(*x.shape[:-1], -1)


@dataclass
class Layer:
    """One decoder layer. qkv [(heads + 2·kv_heads)·D, H], gate_up [2·I, H]; q_norm and k_norm [D] are Qwen3's."""

    input_norm: Tensor
    qkv: Linear
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class KVCache:
    """Keys and values [layers, slots, K, S, D]. A slot holds one request; `lengths` is kept by the caller, so that
    rejecting drafted tokens is nothing but a smaller length."""

    def __init__(self, layers: int, slots: int, kv_heads: int, positions: int, head_dim: int, like: Tensor) -> None:
        shape = (layers, slots, kv_heads, positions, head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

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


def rope_table(config: DecoderConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D], float32; rope_scaling of type llama3 as in transformers."""
    inverse = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim)
    if config.rope_scaling:
        low, high = config.rope_scaling["low_freq_factor"], config.rope_scaling["high_freq_factor"]
        factor, original = config.rope_scaling["factor"], config.rope_scaling["original_max_position_embeddings"]
        wavelength = 2 * math.pi / inverse
        smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        inverse = (1 - smooth) * inverse / factor + smooth * inverse
    angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split convention; x [..., D] with cos and sin broadcast to it."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """A frozen target. All methods run without gradients."""

    def __init__(
        self, config: DecoderConfig, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Tensor
    ) -> None:
        self.config, self.embedding, self.layers, self.norm = config, embedding, layers, norm
        self.head_weight, self.head = head, Linear(head)
        self._rope = rope_table(config, 1024, embedding.device)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def pack(self) -> Decoder:
        """Pack the weights for inference on a CPU (about a third more memory while it runs, none after)."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                linear.pack()
        self.head.pack()
        return self

    def new_cache(self, slots: int, positions: int) -> KVCache:
        c = self.config
        return KVCache(c.layers, slots, c.kv_heads, positions, c.head_dim, self.embedding)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """[..., V] float32 from the last state [..., H] before the final norm."""
        return self.head(F.rms_norm(last, (last.shape[-1],), self.norm, self.config.eps)).float()

    @torch.inference_mode()
    def packed(
        self,
        ids_T: Tensor,
        lengths: Sequence[int],
        points: Iterable[int] = (),
        cache: KVCache | None = None,
        slots: Sequence[int] = (),
        until: int | None = None,
    ) -> Stream:
        """Run rows laid end to end, each causal within itself, from position 0; no padding is computed.

        Args:
            ids_T: token ids of all rows, i64 [T] with T = sum(lengths).
            lengths: tokens a row.
            points: points whose states to keep, each [T, H].
            cache: where to store keys and values for later decoding: row i goes to slot slots[i].
            until: stop after this many layers (`last` is then the state at that point).
        """
        c = self.config
        position_T = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            for i, n in enumerate(lengths):
                part = slice(starts[i], starts[i] + n)
                q_, k_, v_ = (x[part].transpose(0, 1) for x in (q, k, v))
                if cache is not None:
                    cache.keys[layer, slots[i], :, :n] = k_
                    cache.values[layer, slots[i], :, :n] = v_
                group = c.heads // c.kv_heads
                k_, v_ = (x.repeat_interleave(group, dim=0) for x in (k_, v_))
                out[part] = F.scaled_dot_product_attention(q_[None], k_[None], v_[None], is_causal=True)[0].transpose(
                    0, 1
                )
            return out

        return self._run(ids_T, position_T, attend, points, until)

    @torch.inference_mode()
    def decode(self, ids_BQ: Tensor, lengths_B: Tensor, cache: KVCache, points: Iterable[int] = ()) -> Stream:
        """Run Q new tokens of each of the first B cache slots; token q of request b sits at position lengths_B[b] + q.

        Keys and values are written at those positions. States come as [B, Q, H].
        """
        c = self.config
        B, Q = ids_BQ.shape
        position_BQ = lengths_B[:, None] + torch.arange(Q, device=self.device)
        S = int(position_BQ.max()) + 1
        mask = torch.arange(S, device=self.device) <= position_BQ[:, :, None]
        group = c.heads // c.kv_heads
        mask = mask[:, None, None].expand(B, 1, group, Q, S).reshape(B, 1, group * Q, S)
        bias = torch.zeros(mask.shape, dtype=self.embedding.dtype, device=self.device).masked_fill_(~mask, -math.inf)
        row_BQ = torch.arange(B, device=self.device)[:, None].expand(B, Q)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[layer, row_BQ, :, position_BQ] = k.view(B, Q, c.kv_heads, c.head_dim)
            cache.values[layer, row_BQ, :, position_BQ] = v.view(B, Q, c.kv_heads, c.head_dim)
            q_ = (
                q.view(B, Q, c.kv_heads, group, c.head_dim)
                .permute(0, 2, 3, 1, 4)
                .reshape(B, c.kv_heads, group * Q, c.head_dim)
            )
            k_, v_ = cache.keys[layer, :B, :, :S], cache.values[layer, :B, :, :S]
            out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=bias)
            return (
                out.view(B, c.kv_heads, group, Q, c.head_dim).permute(0, 3, 1, 2, 4).reshape(B * Q, c.heads, c.head_dim)
            )

        flat = self._run(ids_BQ.reshape(-1), position_BQ.reshape(-1), attend, points, None)
        return Stream(flat.last.view(B, Q, -1), {p: s.view(B, Q, -1) for p, s in flat.states.items()})

    def _run(self, ids: Tensor, position: Tensor, attend: Attend, points: Iterable[int], until: int | None) -> Stream:
        c, wanted = self.config, set(points)
        cos, sin = (t[:, None] for t in self._rotary(position))
        x = F.embedding(ids, self.embedding)
        states = {0: x} if 0 in wanted else {}
        stop = c.layers if until is None else until
        for i, layer in enumerate(self.layers[:stop]):
            h = F.rms_norm(x, (c.hidden_size,), layer.input_norm, c.eps)
            q, k, v = (
                layer.qkv(h).view(-1, c.heads + 2 * c.kv_heads, c.head_dim).split((c.heads, c.kv_heads, c.kv_heads), 1)
            )
            if layer.q_norm is not None and layer.k_norm is not None:
                q = F.rms_norm(q, (c.head_dim,), layer.q_norm, c.eps)
                k = F.rms_norm(k, (c.head_dim,), layer.k_norm, c.eps)
            attended = attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + layer.out(attended.reshape(-1, c.heads * c.head_dim))
            gate, up = layer.gate_up(F.rms_norm(x, (c.hidden_size,), layer.post_norm, c.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
            if i + 1 in wanted:
                states[i + 1] = x
        return Stream(x, states)

    def _rotary(self, position: Tensor) -> tuple[Tensor, Tensor]:
        need = int(position.max()) + 1
        if need > self._rope[0].shape[0]:
            self._rope = rope_table(self.config, max(need, 2 * self._rope[0].shape[0]), self.device)
        return self._rope[0][position].to(self.embedding.dtype), self._rope[1][position].to(self.embedding.dtype)
