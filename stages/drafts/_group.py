"""The processes of one training run: one alone, or several that torchrun (or the stage itself) started on the same rows.

A step means the same whatever their number: its rows are shared out, each process adds up the gradients of its own, and
the sums are added up over the processes. What only one may do (writing) the first does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from stages.contracts.errors import EngineError

if TYPE_CHECKING:
    from stages.drafts._loss import Teacher
    from stages.drafts._module import Eagle3
    from stages.drafts._shards import ShardedLook


class Group:
    """Rank `rank` of `size` processes; size 1 needs no torch.distributed and never waits. sharded: the draft's pass, where
    each process keeps a part of its weights."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size, self.device = rank, size, device or torch.device("cpu")
        self.sharded: ShardedLook | None = None

    def shard(self, draft: Eagle3, teacher: Teacher) -> None:
        """Share the draft's weights out; with one process there is nothing to share."""
        if self.size > 1:
            from stages.drafts._shards import shard

            self.sharded = shard(draft, teacher, self.size)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Each of the values, added up over the processes; in float64."""
        if self.size == 1:
            return list(values)
        told = torch.tensor(values, dtype=torch.float64, device=self.device)
        with _together():
            dist.all_reduce(told)
        return told.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _together():
            dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Go on once all are here."""
        if self.size > 1:
            self.gather(None)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make every process's gradients the sum of all; a parameter without one counts as zeros."""
        if self.size == 1:
            return
        wanted = list(parameters)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in wanted])
        with _together():
            dist.all_reduce(flat)
        for parameter, part in zip(wanted, flat.split([p.numel() for p in wanted]), strict=True):
            parameter.grad = part.view_as(parameter).clone()


ALONE = Group()


def join(device: torch.device) -> Group:
    """The group that this process was started in, as torchrun's environment tells it; alone without one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Group(device=device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Group(dist.get_rank(), size, device)


def leave() -> None:
    """End this process's part in its group, where it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def share_out(rows: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Rows in `parts` lists of about equal tokens, longest rows first; the same for the same arguments. Some may be empty.

    Args:
        lengths: tokens of every row there is, by row number.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for row in sorted(rows, key=lambda r: (-lengths[r], r)) if parts > 1 else rows:
        least = tokens.index(min(tokens))
        shares[least].append(row)
        tokens[least] += lengths[row]
    return shares


@contextmanager
def _together() -> Iterator[None]:
    """Raises EngineError when another process has gone, which torch tells as a lost connection."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(
            "Another process of this training run has ended",
            where=f"process {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}",
            expected="all of them at the same step",
            got=str(error).splitlines()[0][:200],
            do="see what the other one said above; then `dvc repro train` goes on from the last resume point",
        ) from error
