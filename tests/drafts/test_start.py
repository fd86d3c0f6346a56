"""Where training starts: the target's last layer, whatever the number of key-value heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.contracts.draft import DraftNorm
from stages.contracts.errors import DataError
from stages.drafts._training import chain_states, lay_out
from stages.drafts.eagle3 import Eagle3, PackedBatch, Trainer, match_scales, start_draft
from stages.targets import load_target
from tests import tiny
from tests.drafts.test_trainer import SCHEDULE


@pytest.mark.parametrize("kv_heads", [tiny.KV_HEADS, tiny.HEADS])
def test_a_fresh_draft_does_with_the_high_point_what_the_targets_last_layer_does(tmp_path: Path, kv_heads: int) -> None:
    target = load_target(tiny.make_target(tmp_path / "target"))
    ids = torch.arange(0, target.config.vocab_size, 3)
    sizes = {"heads": tiny.HEADS, "head_dim": tiny.HEAD_DIM, "intermediate_size": tiny.INTER}
    draft, teacher = start_draft(target, ids, kv_heads=kv_heads, seed=1, **sizes)
    tokens = torch.randint(0, target.config.vocab_size, (12,))
    stream = target.packed(tokens, [12], (1, 3, tiny.LAYERS - 1))
    batch = PackedBatch(("row",), (12,), tokens, torch.ones(12, dtype=torch.bool), stream.aux((1, 3, 5)), stream.last)
    with torch.no_grad():
        # without its noise, the draft on (states of point n-1) is the last layer: its h is the target's last state
        draft.fc.weight.zero_()[:, -tiny.HIDDEN :] = torch.eye(tiny.HIDDEN)
        for linear in (
            draft.midlayer.self_attn.q_proj,
            draft.midlayer.self_attn.k_proj,
            draft.midlayer.self_attn.v_proj,
        ):
            linear.weight[:, : tiny.HIDDEN] = 0
        h = next(iter(chain_states(draft, batch, lay_out(batch.loss_mask, batch.lengths, 1))))
    torch.testing.assert_close(h, stream.last[:10], rtol=1e-4, atol=1e-4)
    logits = F.linear(draft.norm(h), draft.lm_head.weight)
    torch.testing.assert_close(logits, target.logits(stream.last[:10])[:, ids], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(teacher.distributions(stream.last)[0], target.logits(stream.last)[:, ids].softmax(-1))


def test_a_draft_of_other_sizes_starts_from_the_head_alone_and_is_reproducible(tmp_path: Path) -> None:
    target = load_target(tiny.make_target(tmp_path / "target"))
    ids = torch.arange(40)
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 48, "seed": 3}
    one, two = (start_draft(target, ids, **sizes)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert torch.equal(one.lm_head.weight, target.head_weight[:40])
    assert one.lm_head.weight.data_ptr() != target.head_weight.data_ptr()


@pytest.mark.parametrize(
    "norms",
    [
        ("fc_norm",),
        ("norm_before_fc",),
        ("norm_output",),
        ("fc_norm", "norm_output"),
        ("norm_before_fc", "norm_output"),
    ],
)
def test_with_norms_a_fresh_draft_says_what_it_would_without(tmp_path: Path, norms: tuple[DraftNorm, ...]) -> None:
    target = load_target(tiny.make_target(tmp_path / "target"))
    ids = torch.arange(0, target.config.vocab_size, 3)
    sizes = {
        "heads": tiny.HEADS,
        "kv_heads": tiny.KV_HEADS,
        "head_dim": tiny.HEAD_DIM,
        "intermediate_size": tiny.INTER,
        "seed": 1,
    }
    plain, _ = start_draft(target, ids, **sizes)
    normed, _ = start_draft(target, ids, norms=norms, **sizes)
    tokens = torch.randint(0, target.config.vocab_size, (12,))
    states = torch.randn(12, 3, tiny.HIDDEN)  # all of a size, so that norms take away no more than that
    states *= torch.tensor([2.0, 5.0, 30.0])[:, None] / states.pow(2).mean(-1, keepdim=True).sqrt()
    if norms[0] != "norm_before_fc":  # one norm of all three keeps their proportions, three norms do not
        for draft in (plain, normed):
            draft.fc.weight.data[:, : 2 * tiny.HIDDEN] = 0
    batch = PackedBatch(
        ("row",), (12,), tokens, torch.ones(12, dtype=torch.bool), states.flatten(1), torch.zeros(12, tiny.HIDDEN)
    )

    def states_of(draft: Eagle3) -> Tensor:
        with torch.no_grad():
            return chain_states(draft, batch, lay_out(batch.loss_mask, batch.lengths, 1))[0]

    def growth(draft: Eagle3) -> Tensor:
        """How much smaller than its own states those are that a draft hands on."""
        h = states_of(draft)
        return h.norm() / draft.handed_on(h).norm()

    said = plain.draft_logits(states_of(plain))
    if norms == ("norm_output",):  # which the first step does not show
        assert growth(normed) > 10
    else:
        assert (normed.draft_logits(states_of(normed)) - said).abs().max() > 0.05
    match_scales(normed, batch.aux)
    torch.testing.assert_close(normed.draft_logits(states_of(normed)), said, rtol=1e-3, atol=2e-3)
    assert 0.5 < growth(normed) < 2
    before = {n: p.clone() for n, p in plain.named_parameters()}
    match_scales(plain, batch.aux)
    assert all(torch.equal(p, before[n]) for n, p in plain.named_parameters())


def test_states_that_are_not_kept_do_not_count_and_states_without_size_are_refused(tmp_path: Path) -> None:
    target = load_target(tiny.make_target(tmp_path / "target"))
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 48, "seed": 3}
    aux = torch.randn(5, 3 * tiny.HIDDEN)
    one, two, three = (
        start_draft(target, torch.arange(40), norms=("fc_norm", "norm_output"), **sizes)[0] for _ in "123"
    )
    match_scales(one, aux)
    match_scales(two, torch.cat([torch.zeros(9, 3 * tiny.HIDDEN), aux]))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    for states in (aux * 0, aux[:0], aux.fill_(torch.nan)):
        with pytest.raises(DataError, match="no size by which to scale"):
            match_scales(three, states)


def test_a_frozen_head_stays_the_targets_own_and_the_rest_learns(tmp_path: Path) -> None:
    target = load_target(tiny.make_target(tmp_path / "target"))
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 48, "seed": 3}
    draft, teacher = start_draft(target, torch.arange(40), **sizes, head="frozen")
    trainer = Trainer(draft, teacher, SCHEDULE)
    tokens = torch.randint(0, 40, (12,))
    stream = target.packed(tokens, [12], (1, 3, 5))
    batch = PackedBatch(("row",), (12,), tokens, torch.ones(12, dtype=torch.bool), stream.aux((1, 3, 5)), stream.last)
    before = draft.fc.weight.clone()
    trainer.train(batch)
    assert torch.equal(draft.lm_head.weight, target.head_weight[:40]) and not torch.equal(draft.fc.weight, before)
    assert not any("lm_head" in name for name in trainer.tensors()), "a resume point need not hold what never changes"
    assert torch.equal(trainer.averaged().lm_head.weight, draft.lm_head.weight)
