"""Extraction core: rows through the target, packed without padding, states out in the order of the rows.

T tokens of a batch, L tokens of a row, S slots, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.capture.rows import Row

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder


def batches(rows: Iterable[Row], tokens_per_batch: int) -> Iterator[list[Row]]:
    """Consecutive rows of together at most `tokens_per_batch` tokens; a longer row is a batch of its own."""
    batch: list[Row] = []
    tokens = 0
    for row in rows:
        if batch and tokens + len(row) > tokens_per_batch:
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += len(row)
    if batch:
        yield batch


def capture_rows(
    target: Decoder, rows: Iterable[Row], points: Sequence[int], tokens_per_batch: int
) -> Iterator[Tensor]:
    """Yield bf16 [L, S, H] a row, in order, on the CPU: the points ascending, then the last state before the final norm.

    Computed in the target's own dtype and rounded once, when stored.
    """
    ascending = sorted(points)
    for batch in batches(rows, tokens_per_batch):
        ids_T = torch.cat([torch.from_numpy(row.input_ids) for row in batch]).long().to(target.device)
        lengths = [len(row) for row in batch]
        stream = target.packed(ids_T, lengths, ascending)
        states = [stream.states[p] for p in ascending] + [stream.last]
        states_TSH = torch.empty(
            (len(ids_T), len(states), stream.last.shape[-1]), dtype=torch.bfloat16, device=ids_T.device
        )
        for slot, state_TH in enumerate(states):
            states_TSH[:, slot] = state_TH
        yield from states_TSH.cpu().split(lengths)
