"""One writer at a time, by a lock that the kernel frees when its holder is killed."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from stages.contracts.errors import LineError

_POLL_S = 0.02


@contextlib.contextmanager
def held(path: Path, limit_s: float, fault: type[LineError], what: str) -> Iterator[None]:
    """Hold the lock file `path`, made where it is not.

    Raises:
        LineError: of type `fault` and saying `what`, when another process holds it for longer than `limit_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise fault(
                        what,
                        where=str(path),
                        expected=f"free within {limit_s:g} s",
                        do="wait for it to end, then do this again",
                    ) from None
                time.sleep(_POLL_S)
        yield
