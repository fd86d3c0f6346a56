"""A server as a process group that cannot outlive us: a deadline to start, a log that is kept, a sure end.

The group's leader is a small shell that starts the server and waits on a pipe only we hold open. However we end, kill -9
included, the kernel closes the pipe and the shell ends the group; there is no moment at which a server runs unguarded, for it is
the guard that starts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stages.contracts.errors import EngineError
from stages.contracts.progress import progress

_GRACE_S = 10.0
_POLL_S = 0.25
_TAIL_LINES = 12
# TERM goes to the server alone, which ends its own helpers: were they asked too, it would take that for a crash.
_GUARD = f"""
exec 3<&0 0</dev/null
"$@" 3<&- &
server=$!
trap 'kill -TERM $server 2>/dev/null' TERM
trap '' INT
(
  read -r _ <&3
  kill -TERM $server 2>/dev/null
  for _ in $(seq {_GRACE_S * 5:.0f}); do kill -0 $server 2>/dev/null || break; sleep 0.2; done
  kill -KILL 0
) &
exec 3<&-
while kill -0 $server 2>/dev/null; do wait $server; done
"""


class ServerProcess:
    """A command running in a group of its own; stdout and stderr go to `log`."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "guard", *command], env=dict(env), stdin=subprocess.PIPE, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def group(self) -> int:
        """The process group's id."""
        return self._shell.pid

    @property
    def running(self) -> bool:
        return self._shell.poll() is None

    def tail(self) -> str:
        """The log's last lines."""
        lines = self.log.read_text(errors="replace").replace("\r", "\n").splitlines()
        return "\n    ".join(line for line in lines[-_TAIL_LINES:] if line.strip())

    def wait_until(self, ready: Callable[[], bool], limit_s: float, label: str) -> None:
        """Return once `ready()` is true.

        Raises:
            EngineError: the server ended, or is not ready within `limit_s` seconds; it tells the log's last lines.
        """
        started = seen = time.monotonic()
        with progress(limit_s, label, "s at most") as advance:
            while True:
                if not self.running:
                    raise self._failed("The server ended before it was ready", "a server that starts", "it ended")
                if ready():
                    return
                now = time.monotonic()
                if now - started > limit_s:
                    raise self._failed("The server did not start in time", f"an answer within {limit_s:g} s", "none")
                advance(now - seen)
                seen = now
                time.sleep(_POLL_S)

    def end(self) -> None:
        """End the whole group: asked first, killed after some seconds' grace. May be called again."""
        if self.running:
            self._shell.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # what does not end when asked is killed below
            self._shell.wait(_GRACE_S)
        deadline = time.monotonic() + _GRACE_S
        while members(self.group) and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)
            time.sleep(0.05)
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()

    def _failed(self, what: str, expected: str, got: str) -> EngineError:
        return EngineError(
            what,
            where=str(self.log),
            expected=expected,
            got=f"{got}; its last lines:\n    {self.tail()}",
            do="read the log; settings are in params.yaml: serve.sglang",
        )


def members(group: int) -> list[int]:
    """Processes of a group that still run; what has ended and waits for its parent to look is not counted."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found
