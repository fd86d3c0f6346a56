"""The cached draft against the trained module computed plainly, without a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.contracts.draft import DraftNorm
from stages.drafts._decode import DraftDecoder
from stages.drafts.eagle3 import Eagle3, rotary
from stages.targets import load_target
from stages.targets._decoder import Linear, rotate
from tests import tiny
from tests.drafts.reference import CHOICES
from tests.engines.parts import random_checkpoint


def plainly(draft: Eagle3, ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and what the next step takes, at the last of n positions with inputs `ids` [n] (tokens 1..n) and fused states g [n, H]."""
    a, n = draft.midlayer.self_attn, len(ids)
    x = draft.block_input(ids, g)
    cos, sin = rotary(draft.config, torch.arange(n), x)
    q, k = (rotate(a.heads(proj, x), cos, sin) for proj in (a.q_proj, a.k_proj))
    group = draft.config.heads // draft.config.kv_heads
    k, v = (y.repeat_interleave(group, 1) for y in (k, a.heads(a.v_proj, x)))
    scores = torch.einsum("qhd,khd->hqk", q, k) / draft.config.head_dim**0.5
    scores = scores.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
    h = draft.block_output(g, torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return draft.draft_logits(h)[-1], draft.handed_on(h)[-1]


@pytest.mark.parametrize(("packed", "norms"), [(True, ()), *((False, norms) for norms in CHOICES)])
def test_cached_feeding_and_drafting_equals_the_trained_module(
    tmp_path_factory: pytest.TempPathFactory, packed: bool, norms: tuple[DraftNorm, ...]
) -> None:
    target = load_target(tiny.make_target(tmp_path_factory.mktemp("target")))
    checkpoint = random_checkpoint(target, norms=norms)
    module = checkpoint.module(target.embedding).eval()

    def linear(weight: Tensor) -> Linear:
        product = Linear(weight)
        if packed:
            product.pack()
        return product

    draft = DraftDecoder(checkpoint, points=tiny.POINTS, embedding=target.embedding, linear=linear)
    draft.open(2, 32)
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 250, (n,), generator=g) for n in (9, 5)]
    aux = [torch.randn(n, 3 * tiny.HIDDEN, generator=g) for n in (9, 5)]
    fed = [0, 0]
    for ends in ([4, 3], [5, 5], [9, 5]):  # a prompt, a round that keeps one and two, then one row fed again
        starts = [min(f, e - 1) for f, e in zip(fed, ends, strict=True)]
        spans = [range(s, e) for s, e in zip(starts, ends, strict=True)]
        rows = [torch.tensor(list(s)) for s in spans]
        logits, state = draft.feed(
            torch.cat([i[r] for i, r in zip(ids, rows, strict=True)]),
            torch.cat([a[r] for a, r in zip(aux, rows, strict=True)]),
            torch.cat([torch.full_like(r, slot) for slot, r in enumerate(rows)]),
            torch.cat(rows),
            torch.tensor([len(r) for r in rows]).cumsum(0) - 1,
        )
        next_B = draft.target_ids[logits.argmax(-1)]
        later, _ = draft.step(next_B, state, torch.tensor(ends))
        for slot, end in enumerate(ends):
            g_n = module.fuse(aux[slot][:end])
            with torch.no_grad():
                expected, h = plainly(module, ids[slot][:end], g_n)
                chained = plainly(
                    module, torch.cat([ids[slot][:end], next_B[slot : slot + 1]]), torch.cat([g_n, h[None]])
                )
            torch.testing.assert_close(logits[slot], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(later[slot], chained[0], rtol=1e-4, atol=1e-4)
        fed = ends
