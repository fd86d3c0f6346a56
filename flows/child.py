"""One command as a child that cannot outlive us: its own process group, read line by line, ended whole.

Prefect's time-outs and cancellations set a state; they cannot end a process that blocks. So the group is ended here: on
a time limit, on any exception in the parent (Prefect turns SIGTERM into one), and, should the parent be killed outright,
by a guard that waits on a pipe only the parent holds open.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.contracts.errors import LineError

_GRACE_S = 5.0
_POLL_S = 0.2
_GUARD = f"read -r _; kill -TERM -$0 && sleep {_GRACE_S:.0f}; kill -KILL -$0"


class TimeLimit(LineError):
    """A command took longer than it may; its whole process group is gone."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (negative: the signal that ended it) and all it printed."""

    code: int
    lines: tuple[str, ...]


def run_child(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    time_limit_s: float,
    on_line: Callable[[str], None],
) -> Ended:
    """Run `command` to its end and hand each line it prints (stdout and stderr) to `on_line` as it comes.

    Raises:
        TimeLimit: still running after `time_limit_s`; the process group has been ended.
    """
    child = subprocess.Popen(
        command, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, str(child.pid)], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        lines = _read_lines(child, time.monotonic() + time_limit_s, on_line)
    except TimeoutError as error:
        raise TimeLimit(
            "A stage took longer than it may and was ended",
            where=" ".join(command),
            expected=f"an end within {time_limit_s:g} s",
            do="raise stage_time_limit_s for this run, or look at the last lines of the log for what it waits on",
        ) from error
    finally:
        guard.kill()
        guard.communicate()
        end_group(child)
    return Ended(child.returncode, tuple(lines))


def _read_lines(child: subprocess.Popen[bytes], deadline: float, on_line: Callable[[str], None]) -> list[str]:
    """All lines until the child ends (a grandchild may hold the pipe open longer).

    Raises:
        TimeoutError: the deadline passed.
    """
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    lines: list[str] = []
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError
            ended = child.poll() is not None  # asked before reading, so that nothing printed before the end is lost
            piece = child.stdout.read(1 << 16) if ready.select(_POLL_S) else None
            *whole, rest = (rest + (piece or b"")).replace(b"\r", b"\n").split(b"\n")
            if ended and not piece:
                whole.append(rest)
            for line in (raw.decode(errors="replace").rstrip() for raw in whole):
                if line:
                    lines.append(line)
                    on_line(line)
            if ended and not piece:
                return lines
            if piece == b"":  # the pipe is closed and the child still runs
                time.sleep(_POLL_S)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End what is left of the child's process group: asked first, killed after a few seconds' grace."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            break
        _wait_for_group(child, _GRACE_S)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _wait_for_group(child: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        child.poll()  # reaps the child: a zombie would keep its group alive
        try:
            os.killpg(child.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
