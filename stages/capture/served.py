"""Extraction by an engine that serves: states of the points over its own way out, the last state computed here.

No engine hands out the last state as training needs it. SGLang cannot capture point n, and what it returns as the last state comes
after the final norm, which has thrown its scale away. But the layers above the highest point see nothing else than the states at
that point, of the same row: so they are run here, from there. For n = 30 and points up to 28 that is 2 layers of 30.

T tokens of a batch, L tokens of a row, F = points · H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.capture.rows import Row
from stages.capture.spill import batches
from stages.contracts.errors import EngineError

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder, Layer, Parts

Fetch = Callable[[Sequence[int]], Tensor]  # token ids of a row -> its states [L, F], points ascending


def capture_served(
    target: Decoder, rows: Iterable[Row], points: Sequence[int], tokens_per_batch: int, fetch: Fetch, at_once: int
) -> Iterator[Tensor]:
    """Yield bf16 [L, S, H] a row, in order, as `capture_rows` does; at most `at_once` rows are asked for together.

    Raises:
        EngineError: the engine refuses a row or gives states of another number or width; the row is named.
    """
    width = len(points) * target.config.hidden_size
    with ThreadPoolExecutor(at_once) as pool:
        for batch in batches(rows, tokens_per_batch):
            fetched = pool.map(lambda row: _fetch(fetch, row, width), batch)
            aux = [states.to(target.device) for states in fetched]
            last = above(target, torch.cat(aux), [len(row) for row in batch], max(points))
            for states_LF, last_LH in zip(aux, last.split([len(row) for row in batch]), strict=True):
                states = [*states_LF.chunk(len(points), -1), last_LH.to(states_LF.dtype)]
                yield torch.stack(states, 1).bfloat16().cpu()


def above(target: Decoder, aux_TF: Tensor, lengths: Sequence[int], point: int) -> Tensor:
    """The last state [T, H] before the final norm, from the states at `point`, the last H columns of aux_TF.

    The layers above `point` are a decoder of their own whose embedding, so to speak, is the states. Of a stored target no other
    weight is read.
    """
    states_TH = aux_TF[:, -target.config.hidden_size :].to(target.dtype)
    config = replace(target.config, layers=target.config.layers - point)
    # Neither its norm nor its head is asked for, so the states may stand for them too.
    rest = type(target)(config, states_TH, _Above(target.layers, point), states_TH, states_TH)
    return rest.packed(torch.arange(len(states_TH), device=states_TH.device), lengths).last


class _Above:
    """The layers of a target from `point` on, each read when it is asked for."""

    def __init__(self, layers: Parts[Layer], point: int) -> None:
        self._layers, self._point = layers, point

    def __len__(self) -> int:
        return len(self._layers) - self._point

    def __getitem__(self, i: int, /) -> Layer:
        return self._layers[i + self._point]


def _fetch(fetch: Fetch, row: Row, width: int) -> Tensor:
    try:
        states = fetch(row.input_ids.tolist())
    except EngineError as error:
        raise EngineError(
            error.what, where=f"row {row.row_id}: {error.where}", expected=error.expected, got=error.got, do=error.do
        ) from error
    if tuple(states.shape) != (len(row), width):
        raise EngineError(
            "The engine gave states of another shape than was asked for",
            where=f"row {row.row_id}",
            expected=f"{len(row)} tokens by {width} values: the width of every point",
            got=str(list(states.shape)),
            do="ids that mean one point twice, or none, give fewer: see capture.points",
        )
    return states
