"""The few exception types a caller acts on, and the one place where they become an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


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


def run(main: Callable[[], None]) -> None:
    """Run an entry point: a LineError becomes text on stderr and an exit code, anything else keeps its traceback."""
    try:
        main()
    except LineError as error:
        colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        head = "\x1b[31mrefused\x1b[0m" if colour else "refused"
        print(f"{head if isinstance(error, Refusal) else 'error'}: {error.text()}", file=sys.stderr)
        sys.exit(error.exit_code)
