"""The batches of the next optimizer step are read while this one is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Read = TypeVar("Read")


class ReadAhead(Generic[Read]):
    """What `read` gives of a step; with a thread, that of the following step is begun at the same time.

    Use as a context: it ends the thread.
    """

    def __init__(self, read: Callable[[int], Read], steps: int, *, thread: bool) -> None:
        """
        Args:
            read: a step's number, 0-based, to what it takes; called for one step at a time.
            steps: how many there are.
            thread: whether to read ahead. Worth it where a device computes, and this processor would wait for it.
        """
        self._read, self._steps = read, steps
        self._pool = ThreadPoolExecutor(1, "read-ahead") if thread else None
        self._next: tuple[int, Future[Read]] | None = None

    def __enter__(self) -> ReadAhead[Read]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def __call__(self, step: int) -> Read:
        """Raises what `read` raises for this step."""
        begun, self._next = self._next, None
        if begun and begun[0] == step:
            found = begun[1].result()
        else:
            if begun:
                begun[1].exception()  # another step's, which nobody asked for
            found = self._read(step)
        if self._pool and step + 1 < self._steps:
            self._next = step + 1, self._pool.submit(self._read, step + 1)
        return found
