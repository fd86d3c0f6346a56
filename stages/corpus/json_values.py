"""Rows of JSON text that is laid out over lines: an array, or values one after the other, decoded one at a time."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from stages.contracts.errors import DataError
from stages.corpus.items import RowFault
from stages.corpus.places import Blob

Record = tuple[
    int, Any
]  # the row's number within its file, from 1, and what it holds: a value, a line of JSON, or a RowFault

_READ_CHARACTERS = 1 << 16


@contextmanager
def sound(blob: Blob) -> Iterator[None]:
    """Damage that a decoder finds, told as this project tells it."""
    from pyarrow.lib import ArrowException

    try:
        yield
    except (EOFError, OSError, zlib.error, ArrowException, UnicodeError, OverflowError, KeyError) as error:
        raise DataError(
            "A source's file is damaged or cut off",
            where=blob.where,
            expected="a whole file: what a part of it lacks cannot be counted",
            got=f"{type(error).__name__}: {error}"[:300],
            do="fetch or write it again, and compare its checksum with the origin's",
        ) from error


def no_number(name: str) -> None:
    """For json's parse_constant: NaN and the infinities are no JSON."""
    raise ValueError(f"{name} is no JSON number")


def elements(blob: Blob, stream: BinaryIO, most: int) -> Iterator[Record]:
    """Rows of a JSON file: the elements of its array, or the values that stand in it one after the other. `most` characters
    are held of one.

    Raises:
        DataError: the text is no JSON in a way that hides where the next row starts.
    """
    yield from enumerate(_Values(blob, stream, most), 1)


_LENIENT = json.JSONDecoder(parse_int=len)


class _Values:
    """The values of JSON text, decoded one at a time from a buffer that is refilled."""

    def __init__(self, blob: Blob, stream: BinaryIO, most: int) -> None:
        self._blob, self._decoder, self._most = blob, json.JSONDecoder(parse_constant=no_number), most
        # bytes that are no UTF-8 become lone surrogates, by which the row that holds them is told
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")  # type: ignore[arg-type]
        self._buffer, self._at, self._ended = "", 0, False

    def __iter__(self) -> Iterator[Any]:
        in_array = self._next() == "["
        if in_array:
            self._at += 1
        closed = False
        while mark := self._next():
            if closed:
                raise self._no_json("more text after the end of the array")
            if mark == "," and in_array:
                self._at += 1
            elif mark == "]" and in_array:
                self._at += 1
                closed = True
            else:
                value = self._decode()
                yield value
                if isinstance(value, RowFault) and value.reason == "row cut off":
                    return
        if in_array and not closed:
            yield RowFault("row cut off", "the array has no end")

    def _next(self) -> str:
        """The next character that is no white space, not consumed; "" at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._refill():
                return ""

    def _refill(self) -> bool:
        with sound(self._blob):
            more = self._text.read(max(_READ_CHARACTERS, len(self._buffer) - self._at))
        self._buffer, self._at = self._buffer[self._at :] + more, 0
        self._ended = not more
        return bool(more)

    def _decode(self) -> Any:
        while True:
            fault, hidden = "", False
            try:
                value, end = self._raw()
                if end < len(self._buffer) or self._ended:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                fault, rest = str(error), self._buffer[error.pos :].strip()
                hidden = len(rest) > 8 and not error.msg.startswith("Unterminated string")
            except RecursionError as error:
                fault, hidden = str(error), True
            if len(self._buffer) - self._at > self._most:
                raise self._no_json(f"an element over {self._most} characters, or one that is no JSON: {fault}")
            if not self._refill() and fault:
                if hidden:
                    raise self._no_json(fault)
                return RowFault("row cut off", fault)

    def _raw(self) -> tuple[Any, int]:
        """A value and where it ends; a RowFault for one of NaN, or of more digits than an int may have.

        Raises:
            json.JSONDecodeError, RecursionError: it is unfinished, no JSON, or nested too deeply.
        """
        try:
            return self._decoder.raw_decode(self._buffer, self._at)
        except json.JSONDecodeError:
            raise
        except ValueError as error:
            return RowFault("not JSON", str(error)), _LENIENT.raw_decode(self._buffer, self._at)[1]

    def _no_json(self, got: str) -> DataError:
        return DataError(
            "A source's file is no sound JSON",
            where=self._blob.where,
            expected="an array of rows, or rows one after the other",
            got=got[:300],
            do="mend it, or write it as JSON lines, where one broken row does not hide the others",
        )
