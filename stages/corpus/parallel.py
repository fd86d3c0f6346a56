"""Work shared with processes of its own, results in the order of the tasks, and no more tasks under way than are being done."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Barrier
from typing import Any, TypeVar

from stages.contracts.errors import DataError

Result = TypeVar("Result")
_AHEAD = 3  # tasks a process that wait or are being done
_WATCH_S = 2.0


class Processes:
    """Processes that each call `start` with `settings` before their first task. They are started at once, and `ready` tells
    when all of them can take tasks: starting costs seconds, in which the caller may do some itself.

    Use as a context: it ends them.
    """

    def __init__(self, workers: int, start: Callable[..., None], settings: tuple[Any, ...]) -> None:
        self._workers = workers
        context = multiprocessing.get_context("spawn")
        self._gate = context.Barrier(workers)
        self._pool = ProcessPoolExecutor(workers, context, _start, (os.getpid(), start, settings, self._gate))
        self._started = [self._pool.submit(_nothing) for _ in range(workers)]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._gate.abort()
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def ready(self) -> bool:
        return all(future.done() for future in self._started)

    def in_order(self, tasks: Iterable[tuple[Any, ...]], work: Callable[..., Result]) -> Iterator[Result]:
        """What `work` gives of each task, in the order of the tasks, which are read as results are taken.

        Raises:
            DataError: a process ended early; besides, whatever `work` raises.
        """
        waiting: deque[Future[Result]] = deque()
        try:
            for future in self._started:
                future.result()
            for task in tasks:
                waiting.append(self._pool.submit(work, *task))
                if len(waiting) >= _AHEAD * self._workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "A process that reads rows ended early",
                where=f"params.yaml: prepare.readers, {self._workers}",
                expected="that it ends when the sources do",
                got=str(error),
                do="look for one that was killed, for want of memory perhaps (`dmesg`); fewer of them need less",
            ) from error


def _nothing() -> None:
    """A task whose end tells that a process has started."""


def _start(parent: int, start: Callable[..., None], settings: tuple[Any, ...], gate: Barrier) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    start(*settings)
    gate.wait()  # else the first process to start would do the first task of each


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: nobody would take what it makes."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)
