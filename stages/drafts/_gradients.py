"""The gradients of one optimizer step, in as many pieces and processes as memory and patience ask for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.drafts._group import Group
from stages.drafts._loss import Teacher
from stages.drafts._module import Eagle3
from stages.drafts._shards import ShardedLook
from stages.drafts._training import Ahead, PackedBatch, lay_out, look_ahead


def add_gradients(
    draft: Eagle3, teacher: Teacher, batches: Sequence[PackedBatch], steps: int, decay: float, group: Group
) -> Ahead:
    """Add the step's gradients to the draft's parameters: of `batches`, one after the other, and of the group's others.

    The loss is the mean over the roots of all of them, so that how a step's rows are cut changes rounding only; a batch
    without roots, or a process without batches, adds nothing and waits for nobody.

    Returns:
        loss, hits and tried of the whole step; roots and drafted of this process's own batches.
    """
    parameters = [p for p in draft.parameters() if p.requires_grad]
    if group.size == 1 and len(batches) == 1:
        ahead = look_ahead(draft, teacher, batches[0], steps, decay)
        ahead.loss.backward()
        return ahead
    own = sum(len(lay_out(b.loss_mask, b.lengths, 1).roots[0]) for b in batches)
    in_all = int(group.total([own])[0])
    if group.sharded is None:
        made: list[Ahead] = []
        for batch in batches:
            made.append(look_ahead(draft, teacher, batch, steps, decay, roots_in_all=in_all))
            made[-1].loss.backward()
        group.add_gradients(parameters)
    else:
        made = _sharded(group.sharded, batches, max(group.gather(max(1, len(batches)))), steps, decay, in_all)
    counts = group.total([*_sums(made, steps), float(sum(float(a.loss.detach()) for a in made))])
    return Ahead(
        loss=torch.tensor(counts[-1], dtype=draft.fc.weight.dtype, device=draft.fc.weight.device),
        roots=torch.cat([a.roots for a in made]) if made else _none(draft),
        drafted=torch.cat([a.drafted for a in made]) if made else _none(draft).view(0, steps),
        hits=tuple(map(int, counts[:steps])),
        tried=tuple(map(int, counts[steps : 2 * steps])),
    )


def _sharded(
    look: ShardedLook, batches: Sequence[PackedBatch], pieces: int, steps: int, decay: float, in_all: int
) -> list[Ahead]:
    """The same of a sharded draft: FSDP adds the gradients up, and wants as many passes of every process."""
    made: list[Ahead] = []
    for i in range(pieces):
        loss, ahead = look(batches[i] if i < len(batches) else None, steps, decay, in_all)
        loss.backward()
        made += [ahead] if ahead else []
    return made


def _sums(made: Sequence[Ahead], steps: int) -> list[float]:
    """Hits, then tries, by draft step."""
    return [float(sum(getattr(a, name)[i] for a in made)) for name in ("hits", "tried") for i in range(steps)]


def _none(draft: Eagle3) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=draft.fc.weight.device)
