"""Candidates of a source on disk while all sources are read: memory does not grow with them, and passes can be repeated.

Candidates come packed, some hundred at a time: each pack is an Arrow stream of one batch, and the file holds one after the
other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stages.corpus.grams import Grams
from stages.corpus.items import Message, Reject
from stages.corpus.split import Split

_BATCH_ROWS = 1024
_MESSAGES = json.JSONEncoder(ensure_ascii=False)
_CANDIDATES = pa.schema(
    [
        ("at", pa.int64()),
        ("item", pa.string()),
        ("prompt_id", pa.string()),
        ("held_out", pa.bool_()),
        ("ids", pa.list_(pa.int32())),
        ("prompt_tokens", pa.int32()),
        ("mask", pa.binary()),
        ("cut", pa.bool_()),
        ("loops", pa.bool_()),
        ("row_id", pa.string()),
        ("messages", pa.string()),
        ("grams", pa.list_(pa.uint64())),
    ]
)
_REJECTS = pa.schema([("at", pa.int64()), *((n, pa.string()) for n in ("item", "reason", "detail", "prompt_id"))])


@dataclass(frozen=True, eq=False)
class Given:
    """The whole row where its answers came with it: ids i32 [T], mask bytes [T], whether it was cut, its name, and whether
    its last answer loops."""

    ids: npt.NDArray[np.int32]
    mask: bytes
    cut: bool
    row_id: str
    loops: bool


@dataclass(frozen=True, eq=False)
class Candidate:
    """A prompt that may become a row. `turns` are its messages while it is read, and not kept."""

    item: str
    prompt_id: str
    split: Split
    prompt_ids: npt.NDArray[np.int32]
    messages: str
    given: Given | None = None
    turns: Sequence[Message] = ()

    @property
    def whole_id(self) -> str:
        """What equal rows have in common."""
        return self.prompt_id if self.given is None else self.given.row_id

    @staticmethod
    def messages_of(messages: Sequence[Message]) -> str:
        return _MESSAGES.encode(list(messages))


def place(number: int, further: int) -> int:
    """Where something read stands among all of its source: by its item's number, and its place within the item."""
    return (number << 20) + further


def packed(places: Sequence[int], candidates: Sequence[Candidate], of_prompts: Sequence[Grams]) -> bytes:
    """Candidates, where they stand, and the n-grams of their prompts, as the spool keeps them."""
    if not candidates:
        return b""
    whole = [c.given.ids if c.given else c.prompt_ids for c in candidates]
    given = [c.given for c in candidates]
    columns: dict[str, Any] = {
        "at": list(places),
        "item": [c.item for c in candidates],
        "prompt_id": [c.prompt_id for c in candidates],
        "held_out": [c.split == "held_out" for c in candidates],
        "ids": lists_of(whole, pa.int32()),
        "prompt_tokens": [len(c.prompt_ids) for c in candidates],
        "mask": [g.mask if g else None for g in given],
        "cut": [g.cut if g else False for g in given],
        "loops": [g.loops if g else False for g in given],
        "row_id": [g.row_id if g else None for g in given],
        "messages": [c.messages for c in candidates],
        "grams": lists_of(of_prompts, pa.uint64()),
    }
    made = [c if isinstance(c := columns[f.name], pa.Array) else pa.array(c, f.type) for f in _CANDIDATES]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _CANDIDATES, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        stream.write_batch(pa.record_batch(made, schema=_CANDIDATES))
    return sink.getvalue().to_pybytes()


def lists_of(parts: Sequence[npt.NDArray[Any]], kind: pa.DataType) -> pa.ListArray:
    """Arrays as one column of lists."""
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    flat = np.concatenate(parts) if len(parts) else np.zeros(0)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat, kind))


class _Table:
    """Rows appended to an Arrow stream, and read again from its start as often as wanted."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer: Any = pa.ipc.new_stream(str(path), schema, options=options)
        self._rows: list[tuple[Any, ...]] = []

    def add(self, *values: Any) -> None:
        self._rows.append(values)
        if len(self._rows) == _BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        columns = [pa.array(list(c), f.type) for c, f in zip(zip(*self._rows, strict=True), self._schema, strict=True)]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its rows again."""
        options = pa.ipc.IpcReadOptions(use_threads=False)
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_stream(file, options=options) as stream:
            yield from stream


class Spool:
    """What was read of one source: candidates and rejects in the order in which they were read."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._path = folder / "candidates.arrows"
        self._file = self._path.open("wb")
        self._rejects = _Table(folder / "rejects.arrow", _REJECTS)
        self.candidates = 0

    def add(self, candidates: bytes, count: int, rejects: Sequence[tuple[int, Reject]]) -> None:
        """Take in `count` packed candidates, and rejects, each with its place."""
        self._file.write(candidates)
        self.candidates += count
        for at, reject in rejects:
            self._rejects.add(at, reject.item, reject.reason, reject.detail, reject.prompt_id)

    def close(self) -> None:
        self._file.close()
        self._rejects.close()

    def batches(self, names: Sequence[str] = ()) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of candidates, each with the number of its first; of all columns, or of those named, which then stand in
        the schema's order."""
        wanted = [i for i, field in enumerate(_CANDIDATES) if not names or field.name in names]
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        start, size = 0, self._path.stat().st_size
        with pa.OSFile(str(self._path)) as file:
            while file.tell() < size:
                with pa.ipc.open_stream(file, options=options) as stream:
                    for batch in stream:
                        yield start, batch
                        start += batch.num_rows

    def rejects(self) -> Iterator[tuple[int, Reject]]:
        """Rejects of reading, each with its place among all that was read."""
        for batch in self._rejects.batches():
            for row in batch.to_pylist():
                yield row.pop("at"), Reject(**row)


class LateRejects:
    """Candidates of a source that became no row."""

    def __init__(self, spool: Spool) -> None:
        self._rejects = _Table(spool.folder / "late.arrow", _REJECTS)

    def add(self, reject: Reject) -> None:
        self._rejects.add(0, reject.item, reject.reason, reject.detail, reject.prompt_id)

    def read(self) -> Iterator[Reject]:
        self._rejects.close()
        for batch in self._rejects.batches():
            for row in batch.to_pylist():
                del row["at"]
                yield Reject(**row)


def grams_of(batch: pa.RecordBatch) -> tuple[Grams, npt.NDArray[np.int64]]:
    """Grams of a batch one row after the other, u64, and where each row starts, i64 [rows + 1]."""
    column: Any = batch.column("grams")
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]


def candidates_of(batch: pa.RecordBatch, wanted: npt.NDArray[np.bool_]) -> Iterator[Candidate]:
    """The candidates of a batch for which `wanted` [rows] is true."""
    column: Any = batch.column("ids")
    offsets, ids = column.offsets.to_numpy(), column.values.to_numpy()
    names = ("item", "prompt_id", "held_out", "prompt_tokens", "mask", "cut", "row_id", "loops", "messages")
    plain = {n: batch.column(n).to_pylist() for n in names}
    for i in np.flatnonzero(wanted):
        row, mask = ids[offsets[i] : offsets[i + 1]], plain["mask"][i]
        yield Candidate(
            item=plain["item"][i],
            prompt_id=plain["prompt_id"][i],
            split="held_out" if plain["held_out"][i] else "train",
            prompt_ids=row[: plain["prompt_tokens"][i]],
            messages=plain["messages"][i],
            given=None if mask is None else Given(row, mask, plain["cut"][i], plain["row_id"][i], plain["loops"][i]),
        )


@dataclass
class Tally:
    """Rejects by reason, and the first of them, which an error names."""

    reasons: Counter[str]
    first: Reject | None = None

    def take(self, reject: Reject) -> Reject:
        self.reasons[reject.reason] += 1
        self.first = self.first or reject
        return reject

    @property
    def words(self) -> str:
        """How many of each reason, and what the first is; "" of none."""
        if (one := self.first) is None:
            return ""
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.reasons.items()))
        return f"{reasons}; the first is {one.item}: {one.reason} {one.detail[:80]}".rstrip()
