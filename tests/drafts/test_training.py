"""Training-time test against the slow reference: logits, loss and gradients over packed rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stages.contracts.draft import DraftNorm
from stages.drafts._training import chain_states, lay_out
from stages.drafts.eagle3 import Eagle3, PackedBatch, Teacher, look_ahead
from tests.drafts.reference import CHOICES, chain_logits, make_batch, make_draft, make_teacher, reference_loss

MASKS = ["0001111110", "0000", "00111", "0110111101", "0000011"]


@pytest.mark.parametrize("norms", CHOICES, ids=" ".join)
def test_every_step_from_every_root_equals_a_plain_chain_decoded_alone(norms: tuple[DraftNorm, ...]) -> None:
    draft, batch = make_draft(norms=norms), make_batch(MASKS)
    layout = lay_out(batch.loss_mask, batch.lengths, 4)
    states = list(chain_states(draft, batch, layout))
    starts = torch.tensor(batch.lengths).cumsum(0) - torch.tensor(batch.lengths)
    compared = 0
    for i, (h, roots) in enumerate(zip(states, layout.roots, strict=False)):
        for n, flat in enumerate(roots.tolist()):
            row = int((starts <= flat).sum()) - 1
            part = slice(int(starts[row]), int(starts[row]) + batch.lengths[row])
            expected = chain_logits(
                draft, batch.input_ids[part].tolist(), batch.aux[part], flat - int(starts[row]), i + 1
            )
            torch.testing.assert_close(draft.draft_logits(h[n]), expected[i], rtol=1e-6, atol=1e-6)
            compared += 1
    assert compared == sum(len(r) for r in layout.roots) > 20


@pytest.mark.parametrize(("steps", "norms"), [(1, ()), (5, ()), *((3, norms) for norms in CHOICES)])
def test_loss_and_gradients_equal_the_reference(steps: int, norms: tuple[DraftNorm, ...]) -> None:
    draft, teacher, batch = make_draft(norms=norms), make_teacher(), make_batch(MASKS)
    expected = reference_loss(draft, teacher, batch, steps, 0.8)
    wanted = torch.autograd.grad(expected, list(draft.parameters()))
    ahead = look_ahead(draft, teacher, batch, steps, 0.8)
    torch.testing.assert_close(ahead.loss, expected, rtol=1e-6, atol=1e-8)
    got = torch.autograd.grad(ahead.loss, list(draft.parameters()))
    for (name, _), a, b in zip(draft.named_parameters(), got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def with_accepted_chains(draft: Eagle3, teacher: Teacher, batch: PackedBatch, every: int) -> PackedBatch:
    """The batch with, behind every so many tokens, those that the draft says there, as far as a chain goes."""
    ids = batch.input_ids.clone()
    for at in range(0, len(ids), every):
        for i in range(every - 1):
            said = look_ahead(draft, teacher, replace(batch, input_ids=ids), every - 1, 0.8)
            if len(found := (said.roots == at).nonzero()) and said.drafted[int(found[0]), i] >= 0:
                ids[at + 2 + i] = said.drafted[int(found[0]), i]
    return replace(batch, input_ids=ids)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("norms", [(), ("fc_norm", "norm_output")], ids=" ".join)
def test_accepted_chains_give_the_loss_and_gradients_of_a_reference_that_stops_where_the_draft_errs(
    norms: tuple[DraftNorm, ...], recompute: bool
) -> None:
    draft, teacher = make_draft(norms=norms), make_teacher()
    draft.recompute_steps = recompute
    with torch.no_grad():
        batch = with_accepted_chains(draft, teacher, make_batch(["0011111111", "0111111", "1001101", "000"]), every=4)
    teacher.chains = "accepted"
    ahead = look_ahead(draft, teacher, batch, 4, 0.8)
    found = torch.autograd.grad(ahead.loss, list(draft.parameters()))
    expected = reference_loss(draft, teacher, batch, 4, 0.8, accepted=True)
    assert ahead.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for mine, theirs in zip(found, torch.autograd.grad(expected, list(draft.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert ahead.hits[1] > 0 and ahead.tried[1] <= ahead.hits[0] < ahead.tried[0] and ahead.tried[2] <= ahead.hits[1]
    assert abs(ahead.loss.item() - reference_loss(draft, teacher, batch, 4, 0.8).item()) > 1e-3


def test_what_is_evaluated_follows_every_chain_to_its_end() -> None:
    draft, teacher, batch = make_draft(), make_teacher(), make_batch(["0011111111"])
    with torch.no_grad():
        plain = look_ahead(draft, teacher, batch, 3, 0.8)
        teacher.chains = "accepted"
        assert torch.equal(look_ahead(draft, teacher, batch, 3, 0.8).drafted, plain.drafted)


def test_no_two_choices_of_norms_are_one_computation() -> None:
    losses: list[float] = []
    for norms in CHOICES:
        draft = make_draft(norms=norms)
        draft.load_state_dict(make_draft().state_dict(), strict=False)
        losses.append(float(look_ahead(draft, make_teacher(), make_batch(MASKS), 3, 0.8).loss.detach()))
    apart = [abs(a - b) for i, a in enumerate(losses) for b in losses[:i]]
    assert min(apart) > 1e-4


def test_the_mask_is_what_the_server_asks_for() -> None:
    batch = make_batch(["0001110"])
    # l[p+1] & l[p+2]: p = 2 has the first answer token as input and the second to predict; p = 3 the last pair.
    assert [r.tolist() for r in lay_out(batch.loss_mask, batch.lengths, 3).roots] == [[2, 3], [2], []]


def test_a_root_dies_where_its_turn_ends_and_not_in_the_next_turn() -> None:
    batch = make_batch(["0110111"])
    assert [r.tolist() for r in lay_out(batch.loss_mask, batch.lengths, 2).roots] == [[0, 3, 4], [3]]


def test_rows_do_not_see_each_other() -> None:
    draft, teacher = make_draft(), make_teacher()
    batch = make_batch(["00111", "0001111"])
    alone = replace(
        batch,
        row_ids=batch.row_ids[1:],
        lengths=batch.lengths[1:],
        input_ids=batch.input_ids[5:],
        loss_mask=batch.loss_mask[5:],
        aux=batch.aux[5:],
        last=batch.last[5:],
    )
    together, apart = (look_ahead(draft, teacher, b, 3, 0.8) for b in (batch, alone))
    assert torch.equal(together.drafted[-len(apart.drafted) :], apart.drafted)


def test_what_stands_after_the_last_root_changes_nothing() -> None:
    draft, teacher, batch = make_draft(), make_teacher(), make_batch(["0011100"])
    changed = replace(batch, aux=batch.aux.clone())
    changed.aux[3:] = torch.nan
    assert torch.equal(look_ahead(draft, teacher, batch, 3, 0.8).loss, look_ahead(draft, teacher, changed, 3, 0.8).loss)


def test_tokens_outside_the_draft_vocabulary_add_nothing() -> None:
    draft, teacher, batch = make_draft(), make_teacher(), make_batch(["0011"])
    outside = int((teacher.draft_id < 0).nonzero()[0])
    batch.input_ids[3] = outside
    ahead = look_ahead(draft, teacher, batch, 1, 0.8)
    assert len(ahead.roots) == 1 and float(ahead.loss.detach()) == 0.0
    assert all(float(g.abs().sum()) == 0 for g in torch.autograd.grad(ahead.loss, list(draft.parameters())))


def test_a_row_with_nothing_supervised_adds_nothing_and_stays_finite() -> None:
    draft, teacher = make_draft(), make_teacher()
    ahead = look_ahead(draft, teacher, make_batch(["00000", "00010"]), 3, 0.8)
    ahead.loss.backward()
    assert float(ahead.loss.detach()) == 0.0 and ahead.drafted.shape == (0, 3)
    assert all(p.grad is None or not bool(p.grad.any()) for p in draft.parameters())
    with_row = look_ahead(draft, teacher, make_batch(["0001111"]), 3, 0.8).loss
    batch = make_batch(["0001111"])
    padded = replace(
        batch,
        row_ids=("row0", "empty"),
        lengths=(7, 4),
        input_ids=torch.cat([batch.input_ids, batch.input_ids[:4]]),
        loss_mask=torch.cat([batch.loss_mask, torch.zeros(4, dtype=torch.bool)]),
        aux=torch.cat([batch.aux, batch.aux[:4]]),
        last=torch.cat([batch.last, batch.last[:4]]),
    )
    torch.testing.assert_close(look_ahead(draft, teacher, padded, 3, 0.8).loss, with_row)


def test_the_soft_target_is_the_targets_own_distribution_over_the_draft_vocabulary() -> None:
    teacher = make_teacher()
    last = torch.randn(3, len(teacher.norm), dtype=torch.float64)
    full = torch.randn(len(teacher.draft_id), len(teacher.norm), dtype=torch.float64)
    full[teacher.target_ids] = teacher.head
    normed = last / (last.pow(2).mean(-1, keepdim=True) + teacher.eps).sqrt() * teacher.norm
    whole = (normed @ full.T).softmax(-1)[:, teacher.target_ids]
    target, entropy = teacher.distributions(last)
    cut = whole / whole.sum(-1, keepdim=True)
    torch.testing.assert_close(target, cut)
    torch.testing.assert_close(entropy, -(cut * cut.log()).sum(-1))
