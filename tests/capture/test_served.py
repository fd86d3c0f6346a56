"""Extraction by an engine that serves gives the rows that extraction in this process gives; what it lacks is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from stages.capture.served import above, capture_served
from stages.capture.spill import capture_rows
from stages.contracts.errors import EngineError
from stages.targets._decoder import Decoder
from tests import tiny
from tests.capture.conftest import make_row

ROWS = [make_row(i, 9 + 5 * i) for i in range(5)]


class Engine:
    """Hands out the target's own states, as text would bring them; `cut` of them are missing."""

    def __init__(self, target: Decoder, points: Sequence[int], cut: int = 0) -> None:
        self.target, self.points, self.cut = target, points, cut

    def fetch(self, ids: Sequence[int]) -> Tensor:
        return self.target.packed(torch.tensor(ids), [len(ids)], self.points).aux(self.points)[self.cut :]


@pytest.mark.parametrize("points", [tiny.POINTS, (1, 2, 3)])
def test_both_ways_of_extraction_agree_to_the_last_stored_bit_or_nearly(
    target: Decoder, points: tuple[int, ...]
) -> None:
    served = list(capture_served(target, ROWS, points, 40, Engine(target, points).fetch, at_once=3))
    here = list(capture_rows(target, ROWS, points, 64))
    assert [s.shape for s in served] == [s.shape for s in here]
    for one, other in zip(served, here, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other.float(), rtol=8e-3, atol=1e-4)  # one step of bf16


def test_the_last_state_is_the_target_s_own_before_the_final_norm(target: Decoder) -> None:
    ids = torch.arange(3, 25)
    lengths = [10, 12]
    stream = target.packed(ids, lengths, tiny.POINTS)
    torch.testing.assert_close(above(target, stream.aux(tiny.POINTS), lengths, max(tiny.POINTS)), stream.last)


def test_a_row_with_fewer_states_than_tokens_is_refused_by_name(target: Decoder) -> None:
    engine = Engine(target, tiny.POINTS, cut=1)
    with pytest.raises(EngineError, match="another shape") as error:
        list(capture_served(target, ROWS, tiny.POINTS, 40, engine.fetch, at_once=2))
    assert ROWS[0].row_id in error.value.where and error.value.got.startswith(f"[{len(ROWS[0]) - 1}")


def test_a_row_with_fewer_points_than_asked_for_is_refused(target: Decoder) -> None:
    engine = Engine(target, tiny.POINTS[:2])
    with pytest.raises(EngineError, match="another shape"):
        list(capture_served(target, ROWS, tiny.POINTS, 40, engine.fetch, at_once=2))


def test_what_the_engine_says_of_a_row_is_told_with_the_row(target: Decoder) -> None:
    def refuses(ids: Sequence[int]) -> Tensor:
        raise EngineError("The server gave other states than there are tokens", where="http://there", got="3")

    with pytest.raises(EngineError, match="other states than there are tokens") as error:
        list(capture_served(target, ROWS, tiny.POINTS, 40, refuses, at_once=2))
    assert error.value.where == f"row {ROWS[0].row_id}: http://there"
