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
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.targets._ahead import Ahead
from stages.targets._layers import Layer, Linear, Parts
from stages.targets._rope import rope_table, rotate

__all__ = ["Decoder", "DecoderConfig", "KVCache", "Layer", "Linear", "Stream", "Table", "rotate"]


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


class Table(Protocol):
    """An embedding, head or norm that stands in the files."""

    device: torch.device
    dtype: torch.dtype

    def rows(self, ids: Tensor) -> Tensor: ...
    def whole(self) -> Tensor: ...


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


def _unwatched(layers: int) -> None:
    """For nobody who waits."""


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """A frozen target. All methods run without gradients.

    Whole, every weight is in memory. Stored, layers are read when they are run and forgotten afterwards, rows of the
    embedding when their tokens come, norm and head when they are first asked for.
    """

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor | Table,
        layers: Parts[Layer],
        norm: Tensor | Table,
        head: Tensor | Table,
    ) -> None:
        self.config, self.layers = config, layers
        self._embedding, self._norm, self._head = embedding, norm, head
        self.device, self.dtype = embedding.device, embedding.dtype
        self._rope = self._rope_table(1024)
        self._ahead: Ahead[Stream] | None = None
        self._watch: Callable[[int], None] = _unwatched

    @property
    def stored(self) -> bool:
        """Whether weights are read as they are needed."""
        return not isinstance(self._embedding, Tensor)

    @cached_property
    def embedding(self) -> Tensor:
        return _whole(self._embedding)

    @cached_property
    def norm(self) -> Tensor:
        return _whole(self._norm)

    @cached_property
    def head_weight(self) -> Tensor:
        return _whole(self._head)

    @cached_property
    def head(self) -> Linear:
        return Linear(self.head_weight)

    def pack(self) -> Decoder:
        """Pack the weights for inference on a CPU (about a third more memory while it runs, none after); those of a
        stored target stay as they are."""
        if self.stored:
            return self
        for i in range(len(self.layers)):
            self.layers[i].attention.pack()
            self.layers[i].mlp.pack()
        self.head.pack()
        return self

    def expect(self, rows: Sequence[Tensor], tokens: int, watch: Callable[[int], None] = _unwatched) -> None:
        """Say which rows will be asked for one by one, so that a stored target runs them together and each layer is read
        once for all of them.

        Args:
            rows: ids [L] of each row, in the order they will be asked for.
            tokens: most tokens that are run together; their states are held until other rows are asked for.
            watch: called with the number of layers done, of every pass.
        """
        self._ahead, self._watch = Ahead(rows, tokens), watch

    def new_cache(self, slots: int, positions: int) -> KVCache:
        return KVCache(self.config, slots, positions, self.device, self.dtype)

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
            until: stop after this many layers (`last` is then the state at that point); a stored target reads no
                weight above it.
        """
        if self._ahead is not None and cache is None and until is None and len(lengths) == 1:
            return self._ahead.take(ids_T, frozenset(points), self._packed)
        return self._packed(ids_T, lengths, points, cache, slots, until)

    def _packed(
        self,
        ids_T: Tensor,
        lengths: Sequence[int],
        points: Iterable[int],
        cache: KVCache | None = None,
        slots: Sequence[int] = (),
        until: int | None = None,
    ) -> Stream:
        c = self.config
        position_T = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = q.new_empty(*q.shape[:-1], c.value_dim)
            for i, n in enumerate(lengths):
                part = slice(starts[i], starts[i] + n)
                q_, k_, v_ = (x[part].transpose(0, 1) for x in (q, k, v))
                if cache is not None:
                    cache.keys[layer, slots[i], :, :n] = k_
                    cache.values[layer, slots[i], :, :n] = v_
                group = c.heads // c.kv_heads
                k_, v_ = (x.repeat_interleave(group, dim=0) for x in (k_, v_))
                row = F.scaled_dot_product_attention(q_[None], k_[None], v_[None], is_causal=True, scale=c.scale)[0]
                out[part] = row.transpose(0, 1)
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
        bias = torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill_(~mask, -math.inf)
        row_BQ = torch.arange(B, device=self.device)[:, None].expand(B, Q)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[layer, row_BQ, :, position_BQ] = k.view(B, Q, c.kv_heads, c.head_dim)
            cache.values[layer, row_BQ, :, position_BQ] = v.view(B, Q, c.kv_heads, c.value_dim)
            q_ = (
                q.view(B, Q, c.kv_heads, group, c.head_dim)
                .permute(0, 2, 3, 1, 4)
                .reshape(B, c.kv_heads, group * Q, c.head_dim)
            )
            k_, v_ = cache.keys[layer, :B, :, :S], cache.values[layer, :B, :, :S]
            out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=bias, scale=c.scale)
            out = out.view(B, c.kv_heads, group, Q, c.value_dim).permute(0, 3, 1, 2, 4)
            return out.reshape(B * Q, c.heads, c.value_dim)

        flat = self._run(ids_BQ.reshape(-1), position_BQ.reshape(-1), attend, points, None)
        return Stream(flat.last.view(B, Q, -1), {p: s.view(B, Q, -1) for p, s in flat.states.items()})

    def _run(self, ids: Tensor, position: Tensor, attend: Attend, points: Iterable[int], until: int | None) -> Stream:
        wanted = set(points)
        rotary = self._rotary(position)
        x = F.embedding(ids, self._embedding) if isinstance(self._embedding, Tensor) else self._embedding.rows(ids)
        states = {0: x} if 0 in wanted else {}
        for i in range(self.config.layers if until is None else until):
            x = self._through(self.layers[i], i, x, rotary, attend)
            if i + 1 in wanted:
                states[i + 1] = x
            self._watch(i + 1)
        return Stream(x, states)

    def _through(self, layer: Layer, i: int, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The state after layer `i`, which is held no longer than this."""
        size, eps = (self.config.hidden_size,), self.config.eps
        q, k, v = layer.attention.project(F.rms_norm(x, size, layer.input_norm, eps), *rotary)
        x = x + layer.attention.out(attend(i, q, k, v).reshape(len(x), -1))
        return x + layer.mlp(F.rms_norm(x, size, layer.post_norm, eps))

    def _rotary(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rotary size] at the positions."""
        need = int(position.max()) + 1
        if need > self._rope[0].shape[0]:
            self._rope = self._rope_table(max(need, 2 * self._rope[0].shape[0]))
        cos, sin = (table[position].to(self.dtype)[:, None] for table in self._rope)
        return cos, sin

    def _rope_table(self, positions: int) -> tuple[Tensor, Tensor]:
        c = self.config
        return rope_table(c.rope_dim, c.rope_theta, c.rope_kind, c.rope_scaling, positions, self.device)


def _whole(table: Tensor | Table) -> Tensor:
    return table if isinstance(table, Tensor) else table.whole()
