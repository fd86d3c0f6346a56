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
from typing import Any, TypeVar

from stages.contracts.errors import DataError

Result = TypeVar("Result")
_AHEAD = 3  # tasks a process that wait or are being done
_WATCH_S = 2.0


def in_order(
    tasks: Iterable[tuple[Any, ...]],
    work: Callable[..., Result],
    workers: int,
    start: Callable[..., None],
    settings: tuple[Any, ...],
) -> Iterator[Result]:
    """What `work` gives of each task, in the order of the tasks.

    Args:
        tasks: arguments of `work`; read as results are taken.
        workers: processes, each of which calls `start` with `settings` before its first task.

    Raises:
        DataError: a process ended early; besides, whatever `work` raises.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start, (os.getpid(), start, settings))
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(work, *task))
            if len(waiting) >= _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "A process that reads rows ended early",
            where=f"params.yaml: prepare.workers, {workers}",
            expected="that it ends when the sources do",
            got=str(error),
            do="look for one that was killed, for want of memory perhaps (`dmesg`); fewer workers need less",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(parent: int, start: Callable[..., None], settings: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    start(*settings)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: nobody would take what it makes."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)
