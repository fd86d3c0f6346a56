"""How good a draft is while it trains: stored rows decoded with it as the server would, no target needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stages._train_rows import IndexRow, Rows
from stages.acceptance.lengths import Answer, accept_length, by_domain, gain
from stages.acceptance.simulate import replay_rows
from stages.contracts.errors import DataError
from stages.contracts.params import Params
from stages.drafts.eagle3 import ALONE, Eagle3, Group, HeldOut, Teacher, look_ahead

_AT_ONCE = 2  # times batch_tokens: nothing is kept for a way back


def in_batches(rows: Sequence[IndexRow], tokens: int) -> list[list[IndexRow]]:
    """Rows in their order, as many at once as `tokens` allow, at least one."""
    batches: list[list[IndexRow]] = []
    room = 0
    for row in rows:
        if not batches or row.length > room:
            batches.append([])
            room = tokens
        batches[-1].append(row)
        room -= row.length
    return batches


@torch.no_grad()
def simulate(
    draft: Eagle3, teacher: Teacher, rows: Rows, members: Sequence[IndexRow], params: Params, group: Group
) -> tuple[list[Answer], float]:
    """Every member's first answer as the server would decode it, and the mean KL over roots; shared out over the group.

    Raises:
        DataError: a loss is no number; the rows are named.
    """
    told = params.train
    batches = in_batches(members, _AT_ONCE * told.batch_tokens)
    own: list[tuple[int, list[Answer], float, int]] = []
    for at in range(group.rank, len(batches), group.size):
        batch = rows.pack(batches[at])
        ahead = look_ahead(draft, teacher, batch, told.steps_ahead, told.step_decay)
        if not math.isfinite(loss := float(ahead.loss)):
            raise DataError(
                "The draft makes no numbers of these rows",
                where=f"rows {', '.join(batch.row_ids)}",
                expected="a finite loss",
                got=str(loss),
                do="look at these rows' states (`dvc repro gate-training` checks them), or lower train.learning_rate",
            )
        ids, mask = batch.input_ids.tolist(), batch.loss_mask.tolist()
        prompts = [row.prompt_tokens for row in batches[at]]
        answers = replay_rows(ids, mask, batch.lengths, prompts, ahead.roots.tolist(), ahead.drafted.tolist())
        own.append((at, answers, loss * len(ahead.roots), len(ahead.roots)))
    made = sorted(part for told in group.gather(own) for part in told)
    roots = sum(n for *_, n in made)
    return [a for _, answers, *_ in made for a in answers], sum(loss for *_, loss, _ in made) / max(1, roots)


def train_like(rows: Rows, count: int) -> list[IndexRow]:
    """`count` training rows, evenly over the index, so that every source has its share; always the same."""
    step = max(1, len(rows.train) // count) if count else 1
    return list(rows.train[::step][:count])


def evaluate(draft: Eagle3, teacher: Teacher, rows: Rows, params: Params, group: Group = ALONE) -> HeldOut:
    """Simulate every held-out row, and a few of the training rows."""
    told = params.train
    answers, loss = simulate(draft, teacher, rows, rows.held_out, params, group)
    known, _ = simulate(draft, teacher, rows, train_like(rows, told.evaluate_train_rows), params, group)
    return HeldOut(
        loss=loss,
        overall=accept_length(answers, told.steps_ahead, told.seed),
        by_domain=by_domain(answers, [row.domain for row in rows.held_out], told.steps_ahead, told.seed),
        by_row=tuple((a.tokens, a.verifications) for a in answers),
        train_like=accept_length(known, told.steps_ahead, told.seed) if known else None,
    )


def improves(before: HeldOut, now: HeldOut) -> bool:
    """Whether `now` is better beyond chance: the interval of the gain, over the same answers, lies above nothing."""
    return gain(before.by_row, now.by_row)[1] > 0
