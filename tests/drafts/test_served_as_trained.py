"""What training looks ahead to is what the served draft proposes, from the exported files, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.contracts.draft import DraftNorm
from stages.drafts._decode import DraftDecoder
from stages.drafts.eagle3 import export, look_ahead, read_draft
from tests.drafts.reference import CHOICES, make_batch, make_draft, make_teacher

STEPS = 3


@pytest.mark.parametrize("norms", CHOICES, ids=" ".join)
def test_the_served_draft_proposes_what_training_looked_ahead_to(tmp_path: Path, norms: tuple[DraftNorm, ...]) -> None:
    draft, teacher = make_draft(dtype=torch.float32, norms=norms), make_teacher(dtype=torch.float32)
    batch = make_batch(["000111111111"], dtype=torch.float32)
    with torch.no_grad():
        ahead = look_ahead(draft, teacher, batch, STEPS, 0.8)
    t2d = torch.zeros(len(teacher.draft_id), dtype=torch.bool)
    t2d[teacher.target_ids] = True
    export(draft, tmp_path, (0, 1, 2), teacher.target_ids - torch.arange(len(teacher.target_ids)), t2d)
    served = DraftDecoder(read_draft(tmp_path), points=(1, 2, 3), embedding=draft.embedding)
    compared = 0
    for root, drafted in zip(ahead.roots.tolist(), ahead.drafted.tolist(), strict=True):
        served.open(1, len(batch.input_ids))
        position = torch.arange(root + 1)
        logits, state = served.feed(
            batch.input_ids[position + 1],
            batch.aux[position],
            torch.zeros_like(position),
            position,
            torch.tensor([root]),
        )
        for i in range(STEPS):
            if drafted[i] < 0:
                break
            if i:
                at = torch.tensor([root + i])
                logits, state = served.step(batch.input_ids[at + 1], state, at)
            assert int(served.target_ids[logits.argmax()]) == drafted[i]
            compared += 1
    assert compared == sum(ahead.tried)
