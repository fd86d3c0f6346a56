"""Several processes for one training run, started by the first, so that `dvc repro` alone does it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence

_GRACE_S = 20.0


@contextlib.contextmanager
def beside(processes: int) -> Generator[None, None, None]:
    """Make this process the first of `processes`, the others started with the same command on this machine's loopback.

    Under torchrun, which sets WORLD_SIZE, nothing is started. The others end when this one does: those that still run then
    are ended, and should this one be killed they lose its connection and stop.
    """
    if processes == 1 or "WORLD_SIZE" in os.environ:
        yield
        return
    told = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    ranks = [{**told, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    others = [
        subprocess.Popen([sys.executable, "-m", "stages.train"], env={**os.environ, **rank}, stdin=subprocess.DEVNULL)
        for rank in ranks[1:]
    ]
    ended = threading.Event()
    threading.Thread(target=_mourn, args=(others, ended), daemon=True).start()
    before = {name: os.environ.get(name) for name in ranks[0]}
    os.environ.update(ranks[0])
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):  # what was to be written is written
            for other in others:
                other.wait(_GRACE_S)
    finally:
        ended.set()
        for other in others:
            other.kill()
            other.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _mourn(others: Sequence[subprocess.Popen[bytes]], ended: threading.Event) -> None:
    """End this process a while after one of the others ended badly: before all have met, torch waits half an hour for it."""
    while all(other.poll() in (None, 0) for other in others):
        if ended.wait(1):
            return
    if ended.wait(_GRACE_S):
        return
    print("error: another process of this training run ended, see above", file=sys.stderr, flush=True)
    for other in others:
        other.kill()
    os._exit(2)


def _free_port() -> int:
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return int(at.getsockname()[1])
