"""The few exception types a caller acts on, and the one place where they become an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import NoReturn


class LineError(Exception):
    """An error a user can mend. It says what, where, what was expected and why, what was found, what to do.

    Args:
        what: one sentence, no full stop needed.
        where: file, row, layer, key or command at fault.
        expected: what should have been there, and why.
        got: what was there.
        do: the next command or edit.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", expected: str = "", got: str = "", do: str = "") -> None:
        self.what, self.where, self.expected, self.got, self.do = what, where, expected, got, do
        super().__init__(self.text())

    def text(self) -> str:
        parts = (("where", self.where), ("expected", self.expected), ("got", self.got), ("what to do", self.do))
        return "\n".join([self.what, *(f"  {name}: {value}" for name, value in parts if value)])


class ParamsError(LineError):
    """params.yaml does not say something that can be run."""


class DataError(LineError):
    """A file or row is missing, damaged, doubled or not what its manifest says."""


class EngineError(LineError):
    """A target, draft or engine cannot do what was asked."""


class Refusal(LineError):
    """A gate, or a check that stands for one, said no. Never retried."""

    exit_code = 1


_FULL = "free some space (`df -h`), then do this again: what was whole before still is"
_RIGHTS = "`ls -ld` tells whose it is: give this user the right to write there, then do this again"
# What a user can mend by hand; any other error of the system is a fault of ours and keeps its traceback.
_MENDABLE: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("The disk is full", _FULL),
    errno.EDQUOT: ("The disk quota is used up", _FULL.replace("df -h", "quota -s")),
    errno.EACCES: ("This user may not read or write here", _RIGHTS),
    errno.EPERM: ("This user may not do this here", _RIGHTS),
    errno.EROFS: ("This file system is read-only", "mount it writable (`mount -o remount,rw`), or run where one is"),
    errno.EIO: ("The disk failed to read or write", "`dmesg` tells which disk; copy what is whole to another"),
}


def of_system(error: OSError) -> LineError | None:
    """A full, read-only or failing disk, or a missing right, in words; None for any other error of the system."""
    if error.errno not in _MENDABLE:
        return None
    what, do = _MENDABLE[error.errno]
    where = ", ".join(os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, str | bytes))
    got = f"{errno.errorcode[error.errno]}: {error.strerror or error}"
    return LineError(what, where=where or f"not told; the current folder is {os.getcwd()}", got=got, do=do)


def run(main: Callable[[], None]) -> None:
    """Run an entry point: a LineError becomes text on stderr and an exit code, and so does a full or forbidden disk;
    anything else keeps its traceback."""
    try:
        main()
    except LineError as error:
        _leave(error)
    except OSError as error:
        told = of_system(error)
        if told is None:
            raise
        _leave(told)


def _leave(error: LineError) -> NoReturn:
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    head = "\x1b[31mrefused\x1b[0m" if colour else "refused"
    print(f"{head if isinstance(error, Refusal) else 'error'}: {error.text()}", file=sys.stderr)
    sys.exit(error.exit_code)
