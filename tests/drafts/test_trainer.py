"""The optimizer's side: learning, order of rows, schedule, the end of numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stages.acceptance.lengths import accept_length
from stages.acceptance.simulate import replay_rows
from stages.contracts.errors import DataError
from stages.drafts.eagle3 import BatchOrder, PackedBatch, Schedule, Teacher, Trainer, look_ahead
from tests.drafts.reference import CONFIG, make_batch, make_draft, make_teacher

SCHEDULE = Schedule(
    optimizer_steps=150,
    learning_rate=0.01,
    warmup_share=0.05,
    weight_decay=0.0,
    gradient_clip=1.0,
    steps_ahead=3,
    step_decay=0.8,
)
F32 = torch.float32


def sure_of_its_tokens(batch: PackedBatch, teacher: Teacher) -> PackedBatch:
    """The batch with tokens from the draft vocabulary, and last states whose distribution is sure of the next token."""
    ids = teacher.target_ids[batch.input_ids % len(teacher.target_ids)]
    directions = torch.linalg.pinv(teacher.head * teacher.norm)  # [H, D]
    last = 50 * directions.T[teacher.draft_id[ids.roll(-1)]]
    return replace(batch, input_ids=ids, last=last)


def test_one_batch_can_be_learned_to_the_ceiling() -> None:
    teacher = make_teacher(dtype=F32)
    wide = torch.linalg.qr(torch.randn(CONFIG.draft_vocab_size, CONFIG.hidden_size))[0]
    teacher = Teacher(teacher.norm, 4 * wide, teacher.eps, teacher.target_ids, CONFIG.vocab_size)
    batch = sure_of_its_tokens(make_batch(["0011111111", "000111111"], dtype=F32), teacher)
    trainer = Trainer(make_draft(dtype=F32), teacher, SCHEDULE)
    first = float(trainer.train(batch).loss.detach())
    for _ in range(149):
        ahead = trainer.train(batch)
    assert float(ahead.loss.detach()) < first / 20
    assert ahead.hits == ahead.tried
    answers = replay_rows(
        batch.input_ids.tolist(),
        batch.loss_mask.tolist(),
        batch.lengths,
        [2, 3],
        ahead.roots.tolist(),
        ahead.drafted.tolist(),
    )
    # 8 tokens: first, 4, then 3 left; 6 tokens: first, 4, then 1 left
    assert [a.accepted for a in answers] == [(3, 3), (3, 1)]
    assert accept_length(answers, 3).accept_length == 14 / 4


def test_the_averaged_weights_follow_the_trained_ones_and_are_a_draft() -> None:
    trainer = Trainer(make_draft(dtype=F32), make_teacher(dtype=F32), SCHEDULE)
    batch = make_batch(["0011111"], dtype=F32)
    start = trainer.average["fc.weight"].clone()
    for _ in range(30):
        trainer.train(batch)
    now, average = trainer.draft.fc.weight.detach(), trainer.averaged().fc.weight
    assert 0 < (average - now).norm() < (start - now).norm()
    assert not average.requires_grad
    look_ahead(trainer.averaged(), trainer.teacher, batch, 3, 0.8)


def test_a_loss_that_is_no_number_names_the_rows_and_steps_nothing() -> None:
    trainer = Trainer(make_draft(dtype=F32), make_teacher(dtype=F32), SCHEDULE)
    batch = make_batch(["0011111", "00111"], dtype=F32)
    batch.aux[0] = torch.nan
    before = trainer.draft.fc.weight.detach().clone()
    with pytest.raises(DataError, match=r"no longer a number[\s\S]*step 0, rows row0, row1"):
        trainer.train(batch)
    assert torch.equal(trainer.draft.fc.weight, before) and trainer.step == 0


def test_a_batch_with_nothing_supervised_is_a_step_without_gradient() -> None:
    trainer = Trainer(make_draft(dtype=F32), make_teacher(dtype=F32), SCHEDULE)
    before = trainer.draft.fc.weight.detach().clone()
    assert float(trainer.train(make_batch(["00000"], dtype=F32)).loss.detach()) == 0.0
    assert torch.equal(trainer.draft.fc.weight, before)


def test_rows_without_a_root_leave_a_state_to_resume_from_the_same_in_any_number_of_pieces() -> None:
    """A parameter without a gradient is one with zeros: its moments and weight decay go on, alone as in a group."""
    good, holes = make_batch(["00011111"], dtype=F32), make_batch(["01010101"], dtype=F32)
    one, two, told = (Trainer(make_draft(dtype=F32), make_teacher(dtype=F32), SCHEDULE) for _ in range(3))
    one.train(holes)
    two.load(1, {n: t.clone() for n, t in one.tensors().items()})
    for trainer in (one, two):
        trainer.train(good)
        trainer.train(holes)
    told.train(holes, holes)
    told.train(good)
    told.train(holes, holes)
    for other in (two, told):
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name


def test_all_that_is_made_of_a_draft_is_where_the_draft_is() -> None:
    """On another device than the CPU, of which every machine has one: `meta`, that keeps shapes only."""
    here = Trainer(make_draft(dtype=F32), make_teacher(dtype=F32), SCHEDULE)
    here.train(make_batch(["0011111"], dtype=F32))
    there = Trainer(make_draft(dtype=F32).to("meta"), here.teacher, SCHEDULE)
    there.load(1, here.tensors())
    made = there.averaged()
    held = [made.embedding, *made.parameters(), *there.average.values(), *there.tensors().values()]
    assert {t.device.type for t in held} == {"meta"}


def test_what_tensors_gives_is_all_that_load_needs() -> None:
    batches = [make_batch(["0011111", "00111"], seed=s, dtype=F32) for s in range(6)]
    one, two = (Trainer(make_draft(dtype=F32), make_teacher(dtype=F32), SCHEDULE) for _ in range(2))
    two.train(batches[5])
    for batch in batches[:3]:
        one.train(batch)
    two.load(3, {name: tensor.clone() for name, tensor in one.tensors().items()})
    for batch in batches[3:]:
        assert torch.equal(one.train(batch).loss, two.train(batch).loss)
    again = two.tensors()
    assert all(torch.equal(t, again[n]) for n, t in one.tensors().items())


def test_every_row_comes_once_an_epoch_in_batches_within_the_limit() -> None:
    lengths = [5, 9, 3, 30, 7, 2, 8]
    order = BatchOrder(lengths, batch_tokens=16, seed=4)
    seen: list[int] = []
    step = 0
    while len(seen) < 2 * len(lengths):
        batch = order(step)
        assert sum(lengths[r] for r in batch) <= 16 or len(batch) == 1
        seen += batch
        step += 1
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7)) and seen[:7] != seen[7:]


def test_the_order_depends_on_the_seed_and_the_step_alone() -> None:
    lengths = [4] * 20
    forward, backward = BatchOrder(lengths, 12, 1), BatchOrder(lengths, 12, 1)
    late = [backward(s) for s in (15, 3, 0)]
    assert late == [forward(s) for s in (15, 3, 0)]
    assert [forward(s) for s in range(5)] != [BatchOrder(lengths, 12, 2)(s) for s in range(5)]


def test_the_rate_warms_up_then_falls_to_nothing() -> None:
    rates = [SCHEDULE.rate(s) for s in range(150)]
    peak = rates.index(max(rates))
    assert peak == 8 and rates[peak] == pytest.approx(0.01)
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < rates[0] < 0.002 and 0 < rates[-1] < 1e-5
