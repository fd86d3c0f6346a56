"""A pre-norm decoder: the shape that Llama, Qwen3, DeepSeek-V3 and many others share, whatever their attention and MLP.

Written for three uses with one forward: packed rows without padding (extraction, the layer probe), prefill into a cache,
and batched decoding of a few tokens a request (serving). Shape suffixes: T tokens of all rows, B requests, Q new tokens
a request, S positions in the cache, H hidden size, D head size (Dv of values), K key-value heads, G query heads a key-value head.

The residual stream is named by points (stages/contracts/points.py): `states[k]` is the stream after k layers. The last
state is taken *before* the final norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.targets._ahead import Ahead
from stages.targets._layers import Layer, Linear, Parts
from stages.targets._rope import rope_table, rotate
from stages.targets._stream import DecoderConfig, KVCache, Stream

__all__ = ["Decoder", "DecoderConfig", "KVCache", "Layer", "Linear", "Stream", "Table", "rotate"]


class Table(Protocol):
    """An embedding, head or norm that stands in the files."""

    device: torch.device
    dtype: torch.dtype

    def rows(self, ids: Tensor) -> Tensor: ...
    def whole(self) -> Tensor: ...


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
