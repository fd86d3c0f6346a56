"""FSDP2: each process keeps a part of the draft's weights, of their gradients, averages and optimizer state.

The whole weights are there for as long as a batch is looked at. What leaves a run (evaluation, resume points, export) is whole
too, so a run may go on with or without shards, and in another number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from stages.drafts._loss import Teacher
from stages.drafts._module import Eagle3
from stages.drafts._training import Ahead, PackedBatch, look_ahead


@runtime_checkable
class _Sharded(Protocol):
    """A DTensor, told by what it has: importing its class costs every stage that reads a draft half a second."""

    device: torch.device
    device_mesh: Any
    placements: Any

    def full_tensor(self) -> Tensor: ...


class ShardedLook(nn.Module):
    """look_ahead as a module's forward: that is where FSDP puts the whole weights in place."""

    def __init__(self, draft: Eagle3, teacher: Teacher, processes: int) -> None:
        super().__init__()
        self.draft, self.teacher, self.processes = draft, teacher, processes

    def forward(
        self, batch: PackedBatch | None, steps: int, decay: float, roots_in_all: int
    ) -> tuple[Tensor, Ahead | None]:
        """What to go back from, and what was made of `batch`; without one 0, for every process has to take part.

        FSDP takes the mean of the processes' gradients, and their sum is wanted: so the loss times their number. Every
        parameter has a gradient, if only of zeros: processes that disagreed would wait for each other.
        """
        nothing = torch.stack([p.sum() for p in self.draft.parameters() if p.requires_grad]).sum() * 0
        if batch is None:
            return nothing, None
        ahead = look_ahead(self.draft, self.teacher, batch, steps, decay, roots_in_all=roots_in_all)
        return ahead.loss * self.processes + nothing, ahead


def shard(draft: Eagle3, teacher: Teacher, processes: int) -> ShardedLook:
    """Leave to each of the processes its part of the draft's parameters, which become DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    look = ShardedLook(draft, teacher, processes)
    fully_shard(look, mesh=init_device_mesh(draft.fc.weight.device.type, (processes,)))
    return look


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process; all of them have to ask."""
    return tensor.full_tensor() if isinstance(tensor, _Sharded) else tensor


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`whole` of each."""
    return {name: whole(tensor) for name, tensor in tensors.items()}


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor what this process keeps of `like`, where it keeps that."""
    tensor = tensor.to(like.device)
    if not isinstance(like, _Sharded) or not tensor.dim():
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements)
