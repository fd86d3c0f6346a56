"""The draft's mathematics written the slow and obvious way, in float64: one root at a time, one chain at a time.

Written from the formulae, not from stages/drafts: only parameter names are shared.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stages.contracts.draft import DraftNorm
from stages.drafts.eagle3 import Eagle3, Eagle3Config, PackedBatch, Teacher

CONFIG = Eagle3Config(
    hidden_size=16,
    intermediate_size=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    vocab_size=40,
    draft_vocab_size=23,
    eps=1e-5,
    rope_theta=10000.0,
    max_positions=64,
)
CHOICES: list[tuple[DraftNorm, ...]] = [
    (),
    ("fc_norm",),
    ("norm_before_fc",),
    ("norm_output",),
    ("fc_norm", "norm_output"),
    ("norm_before_fc", "norm_output"),
]
"""Every set of norms that a draft can be trained with."""


def make_draft(
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    config: Eagle3Config = CONFIG,
    norms: tuple[DraftNorm, ...] = (),
) -> Eagle3:
    torch.manual_seed(seed)
    draft = Eagle3(replace(config, norms=norms), torch.randn(config.vocab_size, config.hidden_size)).to(dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return draft


def make_teacher(seed: int = 1, dtype: torch.dtype = torch.float64, config: Eagle3Config = CONFIG) -> Teacher:
    torch.manual_seed(seed)
    ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    head = torch.randn(config.draft_vocab_size, config.hidden_size, dtype=dtype) * 0.3
    norm = 1 + 0.1 * torch.randn(config.hidden_size, dtype=dtype)
    return Teacher(norm, head, config.eps, ids, config.vocab_size)


def make_batch(masks: list[str], seed: int = 2, dtype: torch.dtype = torch.float64) -> PackedBatch:
    """Rows from masks such as "00111": a digit a token, 1 = supervised."""
    torch.manual_seed(seed)
    T, H = sum(map(len, masks)), CONFIG.hidden_size
    return PackedBatch(
        row_ids=tuple(f"row{i}" for i in range(len(masks))),
        lengths=tuple(map(len, masks)),
        input_ids=torch.randint(0, CONFIG.vocab_size, (T,)),
        loss_mask=torch.tensor([c == "1" for mask in masks for c in mask]),
        aux=torch.randn(T, 3 * H, dtype=dtype),
        last=torch.randn(T, H, dtype=dtype),
    )


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head [D]: pair (j, j + D/2) turned by position / theta^(2j/D)."""
    half = len(x) // 2
    angle = (position / theta ** (2 * torch.arange(half).float() / len(x))).float()
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x[:half], x[half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


class Chain:
    """A server's draft for one row: keys and values by position, appended one pair at a time."""

    def __init__(self, draft: Eagle3) -> None:
        self.w, self.c, self.embedding = dict(draft.named_parameters()), draft.config, draft.embedding
        self.norms = draft.config.norms
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, token: int, g: Tensor, position: int) -> Tensor:
        """Append the pair and return h at it."""
        assert position == len(self.keys)
        w, c = self.w, self.c
        at = "midlayer."
        x = torch.cat(
            [
                rms(self.embedding[token], w[at + "input_layernorm.weight"], c.eps),
                rms(g, w[at + "hidden_norm.weight"], c.eps),
            ]
        )
        q, k, v = ((w[f"{at}self_attn.{n}_proj.weight"] @ x).view(-1, c.head_dim) for n in "qkv")
        self.keys.append(torch.stack([turn(head, position, c.rope_theta) for head in k]))
        self.values.append(v)
        out = []
        for head in range(c.heads):
            kv = head // (c.heads // c.kv_heads)
            query = turn(q[head], position, c.rope_theta)
            weight = torch.stack([query @ key[kv] / c.head_dim**0.5 for key in self.keys]).softmax(0)
            out.append(sum(a * value[kv] for a, value in zip(weight, self.values, strict=True)))
        h = g + w[at + "self_attn.o_proj.weight"] @ torch.cat(out)
        y = rms(h, w[at + "post_attention_layernorm.weight"], c.eps)
        gate, up = w[at + "mlp.gate_proj.weight"] @ y, w[at + "mlp.up_proj.weight"] @ y
        return h + w[at + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def fuse(self, aux: Tensor) -> Tensor:
        """g from the three states [3H] of one position."""
        if "norm_before_fc" in self.norms:
            aux = rms(aux, self.w["input_norm.weight"], self.c.eps)
        if "fc_norm" in self.norms:
            H = self.c.hidden_size
            low, middle, high = (
                rms(aux[i * H : i * H + H], self.w[f"fc_norm.{i}.weight"], self.c.eps) for i in range(3)
            )
            aux = torch.cat([low, middle, high])
        return self.w["fc.weight"] @ aux

    def next_g(self, h: Tensor) -> Tensor:
        return rms(h, self.w["norm.weight"], self.c.eps) if "norm_output" in self.norms else h

    def logits(self, h: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ rms(h, self.w["norm.weight"], self.c.eps)


def chain_logits(draft: Eagle3, tokens: list[int], aux: Tensor, root: int, steps: int) -> list[Tensor]:
    """Logits of `steps` draft steps from `root`: all pairs up to it from the target's states, then the chain's own."""
    chain = Chain(draft)
    h = torch.empty(0)
    for p in range(root + 1):
        h = chain(tokens[p + 1], chain.fuse(aux[p]), p)
    found = [chain.logits(h)]
    for i in range(1, steps):
        if root + 1 + i >= len(tokens):
            break
        h = chain(tokens[root + 1 + i], chain.next_g(h), root + i)
        found.append(chain.logits(h))
    return found


def reference_loss(
    draft: Eagle3, teacher: Teacher, batch: PackedBatch, steps: int, decay: float, *, accepted: bool = False
) -> Tensor:
    """The loss by its definition: over rows, roots and steps in plain loops; where `accepted`, a chain ends at the first token
    that the draft would not have said."""
    weights = [decay**i for i in range(steps)]
    total, roots, start = torch.zeros((), dtype=torch.float64), 0, 0
    in_draft = {int(t): i for i, t in enumerate(teacher.target_ids)}
    for length in batch.lengths:
        tokens = batch.input_ids[start : start + length].tolist()
        mask = batch.loss_mask[start : start + length].tolist()
        for p in range(length - 2):
            if not (mask[p + 1] and mask[p + 2]):
                continue
            roots += 1
            for i, z in enumerate(chain_logits(draft, tokens, batch.aux[start : start + length], p, steps)):
                at = p + 2 + i
                if at >= length or not all(mask[p + 1 : at + 1]):
                    break
                if tokens[at] not in in_draft:
                    if accepted:
                        break
                    continue
                y = teacher.head @ rms(batch.last[start + at - 1], teacher.norm, teacher.eps)
                target, own = y.log_softmax(0), z.log_softmax(0)
                total = total + weights[i] / sum(weights) * (target.exp() * (target - own)).sum()
                if accepted and int(z.argmax()) != in_draft[tokens[at]]:
                    break
        start += length
    return total / roots
