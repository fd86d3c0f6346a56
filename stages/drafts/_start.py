"""Where training starts: as much of the target as fits, for the data is small and the target knows the language."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from stages.contracts.draft import DraftNorm
from stages.contracts.errors import DataError
from stages.drafts._loss import Chains, Loss, Teacher
from stages.drafts._module import Eagle3, Eagle3Config

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder, Linear

_SCALE = 0.02  # of whatever starts as noise, the usual one for this width


def start_draft(
    target: Decoder,
    target_ids: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    seed: int,
    norms: Sequence[DraftNorm] = (),
    head: Literal["trained", "frozen"] = "trained",
    loss: Loss = "kl",
    chains: Chains = "all",
    products: Literal["auto", "float32", "bfloat16"] = "float32",
    recompute_steps: bool = False,
) -> tuple[Eagle3, Teacher]:
    """The draft as training starts from it, and the target's head to learn from; both float32 on the target's device.

    Args:
        target: not packed, for its weights are read.
        target_ids: target id of every draft id, ascending, i64.
        norms: of EAGLE-3.1; _module.py says which. They start as ones (`match_scales`).
        head: "frozen" leaves lm_head as the target's own rows, so that neither its gradient nor its optimizer state is
            computed: less work a step, for a little accept length (served on the default rows: 1.692, trained 1.727).
        loss: what training lowers; _loss.py has the formulae.
        chains: how far it follows them; see Teacher.
        products: dtype of training's matrix products; weights, sums and optimizer stay float32 either way.
        recompute_steps: see Eagle3.
    """
    c = target.config
    config = Eagle3Config(
        hidden_size=c.hidden_size,
        intermediate_size=intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=c.vocab_size,
        draft_vocab_size=len(target_ids),
        eps=c.eps,
        rope_theta=c.rope_theta,
        max_positions=c.max_positions,
        bos_id=c.bos_id,
        eos_ids=c.eos_ids,
        norms=tuple(norms),
    )
    ids = target_ids.to(target.device)
    rows = target.head_weight[ids].float()
    low = products_dtype(products, target.device)
    teacher = Teacher(target.norm.float(), rows, c.eps, ids, c.vocab_size, loss=loss, products=low, chains=chains)
    draft = Eagle3(config, target.embedding.float())
    initialise(draft, target, teacher, seed)
    draft.lm_head.requires_grad_(head == "trained")
    draft.recompute_steps = recompute_steps
    return draft.to(target.device), teacher


def products_dtype(told: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    """What `told` means here: auto is bfloat16 where the device multiplies it in hardware (any GPU; a CPU with AMX or
    AVX512-BF16), float32 elsewhere, for there bfloat16 is slower."""
    if told == "auto":
        can = torch.cpu.get_capabilities() if device.type == "cpu" else {"cuda": True}
        told = "bfloat16" if any(can.get(name) for name in ("avx512_bf16", "amx_bf16", "cuda")) else "float32"
    return torch.bfloat16 if told == "bfloat16" else torch.float32


@torch.no_grad()
def initialise(draft: Eagle3, target: Decoder, teacher: Teacher, seed: int) -> None:
    """Fill the draft's parameters, deterministically.

    Head and final norm are the target's. g starts as the high point's state (fc is the identity on slot 2, small noise
    elsewhere); the layer starts as the target's last, where the sizes agree, reading g alone: the half that reads the
    token's embedding starts as small noise, and so does what does not fit.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=_SCALE, generator=generator)
    draft.lm_head.weight.copy_(teacher.head)
    draft.norm.weight.copy_(teacher.norm)
    c, layer, last, H = draft.config, draft.midlayer, target.layers[-1], draft.config.hidden_size
    draft.fc.weight.mul_(0.1)
    draft.fc.weight[:, 2 * H :] += torch.eye(H)
    layer.hidden_norm.weight.copy_(last.input_norm)
    layer.post_attention_layernorm.weight.copy_(last.post_norm)
    own, attention, mlp = target.config, last.attention, last.mlp
    same_heads = (c.heads, c.head_dim) == (own.heads, own.head_dim) and c.kv_heads % own.kv_heads == 0
    if attention.qkv is not None and same_heads:
        q, k, v = _plain(attention.qkv).split([n * c.head_dim for n in (own.heads, own.kv_heads, own.kv_heads)])
        layer.self_attn.q_proj.weight[:, H:] = q
        for linear, part in ((layer.self_attn.k_proj, k), (layer.self_attn.v_proj, v)):
            # More key-value heads than the target has: each of its own stands for several, which compute the same.
            heads = part.view(own.kv_heads, c.head_dim, H).repeat_interleave(c.kv_heads // own.kv_heads, dim=0)
            linear.weight[:, H:] = heads.flatten(0, 1)
        layer.self_attn.o_proj.weight.copy_(_plain(attention.out))
    if mlp.gate_up is None or mlp.down is None:
        return
    if (down := _plain(mlp.down)).shape == layer.mlp.down_proj.weight.shape:
        for linear, part in zip((layer.mlp.gate_proj, layer.mlp.up_proj), _plain(mlp.gate_up).chunk(2), strict=True):
            linear.weight.copy_(part)
        layer.mlp.down_proj.weight.copy_(down)


@torch.no_grad()
def match_scales(draft: Eagle3, aux: Tensor) -> None:
    """Scale a fresh draft with EAGLE-3.1's norms so that it does what it would without them.

    Norms hand fc states of about one instead of the target's own size, and `norm_output` hands a further step states of the size
    of `norm`'s weights. The stream from g to `norm` is read through norms alone, so its size is free: here that of the
    states which are handed on, for all steps. The layer's output stays in proportion. A draft without norms is left alone.

    Args:
        aux: states at the three points of some rows [T, 3H]; rows of zeros do not count.

    Raises:
        DataError: no state is left, or they have no finite size.
    """
    norms, H = draft.config.norms, draft.config.hidden_size
    if not norms:
        return
    kept = aux[(aux != 0).any(dim=-1)].double()  # a store that keeps some states only gives zeros for the others

    def size(x: Tensor) -> float:
        return float(x.square().mean(dim=-1).sqrt().median()) if len(x) else 0.0

    high, whole = size(kept[:, 2 * H :]), size(kept)
    if not all(math.isfinite(x) and x > 0 for x in (high, whole)):
        raise DataError(
            "The states of the first training rows have no size by which to scale a draft with norms",
            where="train.norms",
            expected="finite states that are not zero",
            got=f"{len(kept)} of {len(aux)} tokens' states kept, of size {whole:g}",
            do="look at them (`dvc repro gate-training`), or train without norms",
        )
    given = 1.0 if "fc_norm" in norms else high / whole if "norm_before_fc" in norms else high
    stream = size(draft.norm.weight.double()) if "norm_output" in norms else high
    draft.fc.weight.mul_(stream / given)
    for linear in (draft.midlayer.self_attn.o_proj, draft.midlayer.mlp.down_proj):
        linear.weight.mul_(stream / high)


@torch.no_grad()
def carry_over(draft: Eagle3, tensors: Mapping[str, Tensor], target_ids: Tensor, own_ids: Tensor) -> int:
    """Put an earlier draft's weights in the place of those that training would start from.

    Head rows go by target id: a token that both vocabularies have keeps what was learned of it, one that is new keeps the
    target's own row. A frozen head is not touched: its rows are the target's.

    Args:
        tensors: the earlier draft's parameters by name, of the same shapes but for lm_head.
        target_ids: target id of every row of the earlier draft's head, ascending, i64.
        own_ids: the same of `draft`.

    Returns:
        How many ids of `own_ids` the earlier draft had.
    """
    for name, parameter in draft.named_parameters():
        if name != "lm_head.weight":
            parameter.copy_(tensors[name])
    target_ids = target_ids.to(own_ids.device)
    at = torch.searchsorted(target_ids, own_ids).clamp(max=len(target_ids) - 1)
    known = target_ids[at] == own_ids
    if draft.lm_head.weight.requires_grad:
        draft.lm_head.weight[known] = tensors["lm_head.weight"].to(draft.lm_head.weight)[at[known]]
    return int(known.sum())


def _plain(linear: Linear) -> Tensor:
    assert linear.weight is not None, "packed weights are gone"
    return linear.weight
