"""A trained EAGLE-3 draft as an engine runs it: one layer, its own keys and values, a proposal a call.

Only the newest row of a request needs an answer. All rows before it leave keys and values and nothing else, for there is
one layer: a prompt costs two products. Shapes: B requests, T ragged rows, S positions, H hidden size, F = points · H,
D draft vocabulary, V target vocabulary; K key-value heads, G query heads a key-value head, E head size.

Position p:  x = [input_layernorm(embed(t[p+1])), hidden_norm(g[p])]   g[p] = fc(states at p), or the draft's own last state
             h = g[p] + attention(x), h = h + mlp(h)                   the residual is g before its norm
             proposal = lm_head(norm(h)) for t[p+2]                    and h, before its norm, is the next step's g

With `norm_output` it is h after `norm`; `fc_norm` and `norm_before_fc` norm the states before fc.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.contracts.errors import EngineError
from stages.drafts._export import DraftCheckpoint

Product = Callable[[Tensor], Tensor]
LinearFactory = Callable[[Tensor], Product]
_LAYER = "midlayer."


def plain_linear(weight: Tensor) -> Product:
    """x @ weight.T without any packing."""
    return lambda x: F.linear(x, weight)


class DraftDecoder:
    """A draft ready to serve one engine.

    Args:
        checkpoint: as read by `read_draft`, which audits names and shapes.
        points: points whose states it is fed, ascending; the engine says which (its own reading of config.json).
        embedding: [V, H] the target's, used when the draft has none of its own.
        linear: makes a product of a weight, for example one in a packed layout.

    Raises:
        EngineError: the states fed have another width than the draft takes in.
    """

    def __init__(
        self,
        checkpoint: DraftCheckpoint,
        *,
        points: tuple[int, ...],
        embedding: Tensor,
        linear: LinearFactory = plain_linear,
    ) -> None:
        c, device, dtype = checkpoint.config, embedding.device, embedding.dtype
        if (width := len(points) * c.hidden_size) != (takes := checkpoint.tensors["fc.weight"].shape[1]):
            raise EngineError(
                "The draft takes in other states than the engine feeds it",
                where="config.json: eagle_config.eagle_aux_hidden_state_layer_ids",
                expected=f"{takes} values a position, as fc.weight has",
                got=f"{width} from points {list(points)} (doubled ids count once)",
                do="export the draft for this engine again",
            )
        self.config, self.points = c, points
        t = {name: x.to(device, dtype) for name, x in checkpoint.tensors.items()}
        self.target_ids = checkpoint.target_ids().to(device)
        self.embedding = t.get("embed_tokens.weight", embedding)
        self.input_norm, self.state_norm = t[_LAYER + "input_layernorm.weight"], t[_LAYER + "hidden_norm.weight"]
        self.post_norm, self.norm = t[_LAYER + "post_attention_layernorm.weight"], t["norm.weight"]
        attention, mlp = _LAYER + "self_attn.", _LAYER + "mlp."
        self.input_norm_3H = t.get("input_norm.weight")
        self.fc_norm_H = [t[f"fc_norm.{i}.weight"] for i in range(len(points))] if "fc_norm" in c.norms else []
        self.fc = linear(t["fc.weight"])
        self.qkv = linear(torch.cat([t[f"{attention}{name}_proj.weight"] for name in "qkv"]))
        self.out = linear(t[attention + "o_proj.weight"])
        self.gate_up = linear(torch.cat([t[mlp + "gate_proj.weight"], t[mlp + "up_proj.weight"]]))
        self.down, self.head = linear(t[mlp + "down_proj.weight"]), linear(t["lm_head.weight"])
        self.open(0, 0)

    def open(self, slots: int, positions: int) -> None:
        """Make room for the keys and values of `slots` requests."""
        c = self.config
        shape = (slots, c.kv_heads, positions, c.head_dim)
        self.keys, self.values = self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)
        device = self.embedding.device
        inverse = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, device=device).float() / c.head_dim)
        angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
        angles = torch.cat([angles, angles], dim=-1)
        # The sign of the rotation's other half is put into the sine, so that rotating is a roll and two products.
        sign = torch.ones(c.head_dim, device=device)
        sign[: c.head_dim // 2] = -1
        self._cos, self._sin = angles.cos().to(self.embedding.dtype), (angles.sin() * sign).to(self.embedding.dtype)

    def move(self, source: int, to: int) -> None:
        """Put the request of slot `source` into slot `to`."""
        self.keys[to], self.values[to] = self.keys[source], self.values[source]

    @torch.inference_mode()
    def feed(
        self, ids_T: Tensor, aux_TF: Tensor, slot_T: Tensor, position_T: Tensor, last_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take verified pairs and propose from the newest of each request.

        Args:
            ids_T: token at position_T + 1, rows of slot 0, then of slot 1, …
            aux_TF: the target's states at position_T, points ascending.
            last_B: index into T of each request's newest row.

        Returns:
            logits [B, D] and the draft's own state [B, H], as `step` takes it.
        """
        state_TH = self._fuse(aux_TF)
        q = self._attend_to(ids_T, state_TH, slot_T, position_T)
        return self._answer(q[last_B], state_TH[last_B], position_T[last_B])

    @torch.inference_mode()
    def step(self, ids_B: Tensor, state_BH: Tensor, position_B: Tensor) -> tuple[Tensor, Tensor]:
        """Go on from the draft's own state, which stands in for the target's at position_B."""
        slot_B = torch.arange(len(ids_B), device=ids_B.device)
        return self._answer(self._attend_to(ids_B, state_BH, slot_B, position_B), state_BH, position_B)

    def _fuse(self, aux_TF: Tensor) -> Tensor:
        size, eps = self.config.hidden_size, self.config.eps
        if self.input_norm_3H is not None:
            aux_TF = F.rms_norm(aux_TF, aux_TF.shape[-1:], self.input_norm_3H, eps)
        if self.fc_norm_H:
            parts = zip(aux_TF.split(size, dim=-1), self.fc_norm_H, strict=True)
            aux_TF = torch.cat([F.rms_norm(state, (size,), weight, eps) for state, weight in parts], dim=-1)
        return self.fc(aux_TF)

    def _attend_to(self, ids: Tensor, state: Tensor, slot: Tensor, position: Tensor) -> Tensor:
        """Store keys and values of these pairs; return their queries [rows, heads, E]."""
        qkv = self.qkv(self._input(ids, state)).view(
            -1, self.config.heads + 2 * self.config.kv_heads, self.config.head_dim
        )
        q, k, v = qkv.split((self.config.heads, self.config.kv_heads, self.config.kv_heads), dim=1)
        self.keys[slot, :, position] = self._rotate(k, position)
        self.values[slot, :, position] = v
        return q

    def _input(self, ids: Tensor, state: Tensor) -> Tensor:
        size = (self.config.hidden_size,)
        embedded = F.rms_norm(F.embedding(ids, self.embedding), size, self.input_norm, self.config.eps)
        return torch.cat([embedded, F.rms_norm(state, size, self.state_norm, self.config.eps)], dim=-1)

    def _rotate(self, x: Tensor, position: Tensor) -> Tensor:
        return x * self._cos[position, None] + x.roll(self.config.head_dim // 2, -1) * self._sin[position, None]

    def _answer(self, q: Tensor, residual: Tensor, position_B: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of one query a request over its keys, the MLP and the head; q [B, heads, E]."""
        B, S = len(position_B), int(position_B.max()) + 1
        q = self._rotate(q, position_B).view(
            B, self.config.kv_heads, self.config.heads // self.config.kv_heads, self.config.head_dim
        )
        mask = None
        if B > 1:
            mask = (torch.arange(S, device=q.device) <= position_B[:, None])[:, None, None]
        attended = F.scaled_dot_product_attention(q, self.keys[:B, :, :S], self.values[:B, :, :S], attn_mask=mask)
        h = residual + self.out(attended.reshape(B, self.config.heads * self.config.head_dim))
        gate, up = self.gate_up(F.rms_norm(h, (self.config.hidden_size,), self.post_norm, self.config.eps)).chunk(2, -1)
        h = h + self.down(F.silu(gate) * up)
        normed = F.rms_norm(h, (self.config.hidden_size,), self.norm, self.config.eps)
        return self.head(normed), normed if "norm_output" in self.config.norms else h
