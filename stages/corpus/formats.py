"""Files of rows, recognised by their bytes: JSON lines, JSON, Parquet and Arrow, plain or packed with gzip or zstd.

Files are streamed: what is held is one row (or one batch of a column file), never the file. A row that cannot be read comes
out as a RowFault with its number, and the rows around it pass; a file that is none at all stops the run.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from stages.contracts.errors import DataError
from stages.corpus.items import RowFault
from stages.corpus.json_values import Record, elements, no_number, sound
from stages.corpus.places import Blob
from stages.corpus.shapes import KEYS, ROW_KEYS

Format = Literal["JSON lines", "JSON", "Parquet", "Arrow"]

MAX_LINE_BYTES = 16 << 20  # one row is held in memory, not the file
_HEAD_BYTES = 1 << 16
_DECODER = json.JSONDecoder(parse_constant=no_number)
_BATCH_ROWS = 256
_BOM = b"\xef\xbb\xbf"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame of zstd without data: pzstd begins with one
_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
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


class Line(bytes):
    """A line of JSON lines, not yet parsed: whoever takes the row in does that, in a process of its own where there are
    many."""


def open_rows(blob: Blob) -> Opened:
    """Recognise a file and stream its rows; those of JSON lines as `Line`, which `value_of` parses.

    Raises:
        DataError: it is of no known format; while it is read: it is damaged or cut off in a way that hides how much is missing.
    """
    stream = blob.open()
    with sound(blob):
        head = _peek(stream)
    packed: Literal["", "gzip", "zstd"] = ""
    if head.startswith((_GZIP, _ZSTD)) or _SKIPPABLE.match(head):
        packed = "gzip" if head.startswith(_GZIP) else "zstd"
        stream = _unpacked(stream, packed)
        with sound(blob):
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
        return Opened("JSON", packed, _unwrapped(head, elements(blob, stream, MAX_LINE_BYTES)))
    return Opened("JSON lines", packed, _unwrapped(head, _lines(blob, stream)))


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


def _is_one_value(head: bytes) -> bool:
    """Whether text is JSON laid out over lines (an array, an indented object), not an object a line."""
    text = head.removeprefix(_BOM).lstrip()
    if not text.startswith((b"[", b"{")):
        return False
    first, newline, rest = text.partition(b"\n")
    if text.startswith(b"["):
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return True
        return not rest.strip()  # a whole array on its line: the only line holds rows, one of many is a line of its own
    return bool(newline) and first.rstrip().endswith((b"{", b",", b"[", b":"))


def _unwrapped(head: bytes, records: Iterator[Record]) -> Iterator[Record]:
    """Rows; where a file holds one object and nothing else, which is no row but has a list under one of a few names, those
    of that list."""
    if not head.removeprefix(_BOM).lstrip().startswith(b"{") or (first := next(records, None)) is None:
        yield from records
        return
    rows = _wrapped(value_of(first[1]))
    second = None if rows is None else next(records, None)
    if rows is None or second is not None:
        yield first
        yield from records if second is None else itertools.chain([second], records)
    else:
        yield from enumerate(rows, 1)


def _wrapped(value: Any) -> list[Any] | None:
    if not isinstance(value, dict) or value.keys() & ROW_KEYS:
        return None
    return next((value[k] for k in _WRAPPERS if isinstance(value.get(k), list)), None)


def _lines(blob: Blob, stream: BinaryIO) -> Iterator[Record]:
    """Rows of the lines that are not blank, by line number; a line over MAX_LINE_BYTES is passed over in pieces."""
    number = 0
    while True:
        with sound(blob):
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
            yield number, Line(raw)


def value_of(value: Any) -> Any:
    """What a record holds, parsed: a value, or a RowFault."""
    return _parsed(value) if isinstance(value, Line) else value


def _parsed(raw: Line) -> Any:
    try:
        return _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowFault("not UTF-8", str(error))
    except (ValueError, RecursionError) as error:
        return RowFault("not JSON" if raw.endswith(b"\n") else "line cut off", str(error))


def _columns(blob: Blob, stream: BinaryIO, head: bytes) -> Iterator[Record]:
    """Rows of a Parquet or Arrow file, of the columns that a row may need; the others only show that they are there. What
    is null counts as absent, since the format cannot tell the two apart; a time is its text, of UTC."""
    number = 0
    with sound(blob):
        schema, read = _parquet(stream) if head.startswith(_PARQUET) else _arrow(stream, head)
    others = dict.fromkeys((n for n in schema.names if n not in KEYS), "")
    batches = read(_wanted(blob, schema))
    while True:
        with sound(blob):
            batch = next(batches, None)
            if batch is not None:
                batch.validate(full=True)  # offsets that a flipped bit leads astray end the process otherwise
            rows = None if batch is None else _timeless(batch).to_pylist(maps_as_pydicts="lossy")
        if rows is None:
            return
        for row in rows:
            number += 1
            yield number, _without_nulls(row) | others


def _wanted(blob: Blob, schema: Any) -> list[str]:
    """The columns that a row may need.

    Raises:
        DataError: a name stands twice there.
    """
    fields = [field for field in schema if field.name in KEYS]
    if doubled := _doubled("", fields):
        raise DataError(
            "A column file has two fields of one name",
            where=blob.where,
            expected="each name once: which of the two counts cannot be told",
            got=f"twice `{doubled}`",
            do="rename or drop one of them, and write the file again",
        )
    return [field.name for field in fields]


def _doubled(above: str, fields: Sequence[Any]) -> str:
    """The path of a field whose name stands twice among its neighbours; "" without one."""
    names = [field.name for field in fields]
    for field in fields:
        inner = [field.type.field(i) for i in range(field.type.num_fields)]
        if names.count(field.name) > 1:
            return above + field.name
        if found := _doubled(f"{above}{field.name}.", inner):
            return found
    return ""


def _timeless(batch: Any) -> Any:
    """A batch whose times are text: Python's reach from the year 1 to 9999 only, and JSON has none."""
    import pyarrow as pa

    columns = batch.columns
    for to in (_without_zones, _without_times):
        columns = [c if (kind := to(c.type)) == c.type else c.cast(kind) for c in columns]
    return pa.record_batch(columns, names=batch.schema.names) if columns else batch


def _without_zones(kind: Any) -> Any:
    import pyarrow as pa

    zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    return pa.timestamp(kind.unit) if zoned else _within(kind, _without_zones)


def _without_times(kind: Any) -> Any:
    import pyarrow as pa

    return pa.string() if pa.types.is_temporal(kind) else _within(kind, _without_times)


def _within(kind: Any, to: Callable[[Any], Any]) -> Any:
    """An Arrow type with `to` of each type within it."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(to(f.type)) for f in (kind.field(i) for i in range(kind.num_fields))])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, kind.item_field.with_type(to(kind.item_type)))
    for is_one, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_one(kind):
            return make(kind.value_field.with_type(to(kind.value_type)))
    return kind


_Read = tuple[Any, Callable[[list[str]], Iterator[Any]]]  # a schema, and batches of the columns named


def _parquet(stream: BinaryIO) -> _Read:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
    return file.schema_arrow, lambda names: file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False)


def _arrow(stream: BinaryIO, head: bytes) -> _Read:
    import pyarrow as pa

    if head.startswith(_ARROW_FILE):
        file = pa.ipc.open_file(stream)
        schema, batches = file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
    else:
        stream.seek(-len(_ARROW_END), io.SEEK_END)
        if stream.read() != _ARROW_END:
            raise EOFError("the stream has no end-of-stream mark: batches may be missing")
        stream.seek(0)
        reader = pa.ipc.open_stream(stream)
        schema, batches = reader.schema, iter(reader)
    return schema, lambda names: (
        batch.slice(start, _BATCH_ROWS).select(names)
        for batch in batches
        for start in range(0, batch.num_rows, _BATCH_ROWS)
    )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(v) for v in value]
    return value
