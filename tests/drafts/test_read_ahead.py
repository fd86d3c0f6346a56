"""Batches read while a step is computed: each once, in order, begun early, and faults told at the step that they are of."""

from __future__ import annotations

import threading

import pytest

from stages.contracts.errors import DataError
from stages.drafts._read_ahead import ReadAhead


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("first", [0, 3])
def test_each_step_is_read_once_and_in_order_and_none_beyond_the_last(thread: bool, first: int) -> None:
    read: list[int] = []
    with ReadAhead(lambda step: read.append(step) or step * 10, 6, thread=thread) as ahead:
        assert [ahead(step) for step in range(first, 6)] == [step * 10 for step in range(first, 6)]
    assert read == list(range(first, 6))


def test_the_next_step_is_begun_while_one_is_computed_and_not_without_a_thread() -> None:
    begun = threading.Event()

    def read(step: int) -> int:
        if step == 1:
            begun.set()
        return step

    with ReadAhead(read, 2, thread=False) as ahead:
        ahead(0)
        assert not begun.wait(0.05)
    with ReadAhead(read, 2, thread=True) as ahead:
        ahead(0)
        assert begun.wait(10)


def test_a_step_out_of_turn_is_read_anew() -> None:
    with ReadAhead(lambda step: step, 9, thread=True) as ahead:
        assert [ahead(0), ahead(5), ahead(6), ahead(2)] == [0, 5, 6, 2]


def test_a_row_that_cannot_be_read_is_told_at_its_step_and_the_thread_ends() -> None:
    def read(step: int) -> int:
        if step == 2:
            raise DataError(
                "A row's states are not those of its digest", where="row 2", expected="a", got="b", do="extract"
            )
        return step

    with ReadAhead(read, 9, thread=True) as ahead:
        assert [ahead(1), ahead(5)] == [1, 5]  # step 2's fault is nobody's here
    before = threading.active_count()
    with ReadAhead(read, 9, thread=True) as ahead:
        assert [ahead(0), ahead(1)] == [0, 1]
        with pytest.raises(DataError, match="not those of its digest"):
            ahead(2)
    assert threading.active_count() == before
