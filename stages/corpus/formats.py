"""Files of rows, recognised by their bytes: JSON lines, JSON, Parquet and Arrow, plain or packed with gzip or zstd.

Files are streamed: what is held is one row (or one batch of a column file), never the file. A row that cannot be read comes
out as a RowFault with its number, and the rows around it pass; a file that is none at all stops the run.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from stages.contracts.errors import DataError
from stages.corpus.items import RowFault
from stages.corpus.places import Blob

Format = Literal["JSON lines", "JSON", "Parquet", "Arrow"]
Record = tuple[int, Any]  # the row's number within its file, from 1, and what it holds: a value, or a RowFault

MAX_LINE_BYTES = 16 << 20  # one row is held in memory, not the file
_HEAD_BYTES = 1 << 16
_BATCH_ROWS = 256
_BOM = b"\xef\xbb\xbf"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_WRAPPERS = ("data", "rows", "examples", "items", "instances")  # a JSON object that holds the rows in one list
_FOREIGN = (
    (b"\xff\xfe", "UTF-16 text", "`iconv -f UTF-16 -t UTF-8 FILE > NEW`, and name the new file in `path`"),
    (b"\xfe\xff", "UTF-16 text", "`iconv -f UTF-16 -t UTF-8 FILE > NEW`, and name the new file in `path`"),
    (b"PK\x03\x04", "a zip archive", "unpack it, and name the files in `path`"),
    (b"BZh", "bzip2", "`bunzip2 -k FILE`, and name the unpacked file in `path`"),
    (b"\xfd7zXZ", "xz", "`unxz -k FILE`, and name the unpacked file in `path`"),
)


@dataclass(frozen=True)
class Opened:
    """A file under its format; `packed` is how it is compressed, "" when it is not."""

    format: Format
    packed: Literal["", "gzip", "zstd"]
    records: Iterator[Record]

    @property
    def words(self) -> str:
        return self.format + (f", {self.packed}" if self.packed else "")


def open_rows(blob: Blob) -> Opened:
    """Recognise a file and stream its rows.

    Raises:
        DataError: it is of no known format; while it is read: it is damaged or cut off in a way that hides how much is missing.
    """
    stream = blob.open()
    head = _peek(stream)
    packed: Literal["", "gzip", "zstd"] = ""
    if head.startswith((_GZIP, _ZSTD)):
        packed = "gzip" if head.startswith(_GZIP) else "zstd"
        stream = _unpacked(stream, packed)
        with _sound(blob):
            head = stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]  # type: ignore[attr-defined]
    if head.startswith((_PARQUET, _ARROW_FILE, _ARROW_STREAM)):
        if packed:
            raise _strange(blob, f"a column file packed with {packed}", f"unpack it: `{packed} -dk {blob.where}`")
        column = "Parquet" if head.startswith(_PARQUET) else "Arrow"
        return Opened(column, "", _columns(blob, stream, head))
    for magic, kind, do in _FOREIGN:
        if head.startswith(magic):
            new = blob.where + ".utf8"
            raise _strange(blob, kind, do.replace("FILE", blob.where).replace("NEW", new))
    if _is_one_value(head):
        return Opened("JSON", packed, _elements(blob, stream))
    return Opened("JSON lines", packed, _lines(blob, stream))


def _peek(stream: BinaryIO) -> bytes:
    head = stream.read(_HEAD_BYTES)
    stream.seek(0)
    return head


def _unpacked(stream: BinaryIO, packed: str) -> io.BufferedReader:
    if packed == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=stream), _HEAD_BYTES)
    import pyarrow as pa

    inner: Any = pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd")
    return io.BufferedReader(inner, _HEAD_BYTES)


def _strange(blob: Blob, got: str, do: str) -> DataError:
    return DataError(
        "A source's file is of no format that can be read",
        where=blob.where,
        expected="JSON lines, JSON, Parquet or Arrow; the first two plain or packed with gzip or zstd",
        got=got,
        do=do,
    )


@contextmanager
def _sound(blob: Blob) -> Iterator[None]:
    """Damage that a decoder finds, told as this project tells it."""
    from pyarrow.lib import ArrowException

    try:
        yield
    except (EOFError, OSError, zlib.error, ArrowException, UnicodeError) as error:
        raise DataError(
            "A source's file is damaged or cut off",
            where=blob.where,
            expected="a whole file: what a part of it lacks cannot be counted",
            got=f"{type(error).__name__}: {error}"[:300],
            do="fetch or write it again, and compare its checksum with the origin's",
        ) from error


def _is_one_value(head: bytes) -> bool:
    """Whether text is JSON laid out over lines (an array, an indented object), not an object a line."""
    text = head.removeprefix(_BOM).lstrip()
    if not text.startswith((b"[", b"{")):
        return False
    first, newline, rest = text.partition(b"\n")
    if text.startswith(b"["):
        try:
            json.loads(first)
        except ValueError:
            return True
        return not rest.strip()  # a whole array on its line: the only line holds rows, one of many is a line of its own
    return bool(newline) and first.rstrip().endswith((b"{", b",", b"[", b":"))


def _lines(blob: Blob, stream: BinaryIO) -> Iterator[Record]:
    """Rows of the lines that are not blank, by line number; a line over MAX_LINE_BYTES is passed over in pieces."""
    number = 0
    while True:
        with _sound(blob):
            raw = stream.readline(MAX_LINE_BYTES + 1)
            whole = len(raw) <= MAX_LINE_BYTES
            piece = raw
            while not whole and piece and not piece.endswith(b"\n"):
                piece = stream.readline(MAX_LINE_BYTES)
        if not raw:
            return
        number += 1
        if not whole:
            yield number, RowFault("line too long", f"over {MAX_LINE_BYTES} bytes")
            continue
        if number == 1:
            raw = raw.removeprefix(_BOM)
        if raw.strip():
            yield number, _value(raw)


def _value(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=no_number)
    except UnicodeDecodeError as error:
        return RowFault("not UTF-8", str(error))
    except (ValueError, RecursionError) as error:
        return RowFault("not JSON" if raw.endswith(b"\n") else "line cut off", str(error))


def no_number(name: str) -> None:
    """For json's parse_constant: NaN and the infinities are no JSON."""
    raise ValueError(f"{name} is no JSON number")


def _elements(blob: Blob, stream: BinaryIO) -> Iterator[Record]:
    """Rows of a JSON file: the elements of its array, or the objects that stand in it one after the other; an object that
    is nothing but a list of rows under one name gives that list."""
    reading = _Values(blob, stream)
    number = 0
    for value in reading:
        wrapped = None
        if not reading.in_array and isinstance(value, dict):
            wrapped = next((value[k] for k in _WRAPPERS if isinstance(value.get(k), list)), None)
        for row in [value] if wrapped is None else wrapped:
            number += 1
            yield number, row


class _Values:
    """The values of JSON text, decoded one at a time from a buffer that is refilled."""

    def __init__(self, blob: Blob, stream: BinaryIO) -> None:
        self._blob, self._decoder = blob, json.JSONDecoder(parse_constant=no_number)
        # bytes that are no UTF-8 become lone surrogates, by which the row that holds them is told
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")  # type: ignore[arg-type]
        self._buffer, self._at, self._ended = "", 0, False
        self.in_array = False

    def __iter__(self) -> Iterator[Any]:
        self.in_array = self._next() == "["
        if self.in_array:
            self._at += 1
        closed = False
        while mark := self._next():
            if closed:
                raise self._no_json("more text after the end of the array")
            if mark == "," and self.in_array:
                self._at += 1
            elif mark == "]" and self.in_array:
                self._at += 1
                closed = True
            else:
                value = self._decode()
                yield value
                if isinstance(value, RowFault):
                    return
        if self.in_array and not closed:
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
        with _sound(self._blob):
            more = self._text.read(max(_HEAD_BYTES, len(self._buffer) - self._at))
        self._buffer, self._at = self._buffer[self._at :] + more, 0
        self._ended = not more
        return bool(more)

    def _decode(self) -> Any:
        while True:
            fault = ""
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
                if end < len(self._buffer) or self._ended:
                    self._at = end
                    return value
            except (ValueError, RecursionError) as error:
                fault = str(error)
            if len(self._buffer) - self._at > MAX_LINE_BYTES:
                raise self._no_json(f"an element over {MAX_LINE_BYTES} characters, or one that is no JSON: {fault}")
            if not self._refill() and fault:
                return RowFault("row cut off", fault)

    def _no_json(self, got: str) -> DataError:
        return DataError(
            "A source's file is no sound JSON",
            where=self._blob.where,
            expected="an array of rows, or rows one after the other",
            got=got[:300],
            do="mend it, or write it as JSON lines, where one broken row does not hide the others",
        )


def _columns(blob: Blob, stream: BinaryIO, head: bytes) -> Iterator[Record]:
    """Rows of a Parquet or Arrow file; what is null there counts as absent, since the format cannot tell the two apart."""
    number = 0
    batches = _parquet(stream) if head.startswith(_PARQUET) else _arrow(stream, head)
    while True:
        with _sound(blob):
            batch = next(batches, None)
            rows = None if batch is None else batch.to_pylist(maps_as_pydicts="lossy")
        if rows is None:
            return
        for row in rows:
            number += 1
            yield number, _without_nulls(row)


def _parquet(stream: BinaryIO) -> Iterator[Any]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
    yield from file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)


def _arrow(stream: BinaryIO, head: bytes) -> Iterator[Any]:
    import pyarrow as pa

    if head.startswith(_ARROW_FILE):
        file = pa.ipc.open_file(stream)
        batches: Iterator[Any] = (file.get_batch(i) for i in range(file.num_record_batches))
    else:
        batches = iter(pa.ipc.open_stream(stream))
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(start, _BATCH_ROWS)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(v) for v in value]
    return value
