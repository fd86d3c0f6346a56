"""Candidates of a source on disk while all sources are read: memory does not grow with them, and passes can be repeated."""

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
        ("messages", pa.string()),
        ("grams", pa.list_(pa.uint64())),
    ]
)
_REJECTS = pa.schema([("at", pa.int64()), *((n, pa.string()) for n in ("item", "reason", "detail", "prompt_id"))])


@dataclass(frozen=True, eq=False)
class Candidate:
    """A prompt that may become a row. `given_ids` and `given_mask` hold the whole row when its answers came with it; `turns`
    are its messages while it is read, and not kept."""

    item: str
    prompt_id: str
    split: Split
    prompt_ids: npt.NDArray[np.int32]
    messages: str
    given_ids: npt.NDArray[np.int32] | None = None
    given_mask: bytes = b""
    cut: bool = False
    turns: Sequence[Message] = ()

    @staticmethod
    def messages_of(messages: Sequence[Message]) -> str:
        return json.dumps(list(messages), ensure_ascii=False)


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

    def batches(self, names: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """Its rows again, of all columns or of those named, which then stand in the schema's order."""
        wanted = [i for i, field in enumerate(self._schema) if not names or field.name in names]
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_stream(file, options=options) as stream:
            yield from stream


class Spool:
    """What was read of one source: candidates and rejects in the order in which they were read."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._candidates = _Table(folder / "candidates.arrow", _CANDIDATES)
        self._rejects = _Table(folder / "rejects.arrow", _REJECTS)
        self._at = 0
        self.candidates = 0

    def add(self, taken: Candidate | Reject, of_prompt: Grams | None = None) -> None:
        self._at += 1
        if isinstance(taken, Reject):
            self._rejects.add(self._at, taken.item, taken.reason, taken.detail, taken.prompt_id)
            return
        self.candidates += 1
        ids = taken.prompt_ids if taken.given_ids is None else taken.given_ids
        mask = None if taken.given_ids is None else taken.given_mask
        held, cut, words = (
            taken.split == "held_out",
            taken.cut,
            np.zeros(0, np.uint64) if of_prompt is None else of_prompt,
        )
        n = len(taken.prompt_ids)
        self._candidates.add(self._at, taken.item, taken.prompt_id, held, ids, n, mask, cut, taken.messages, words)

    def close(self) -> None:
        self._candidates.close()
        self._rejects.close()

    def batches(self, names: Sequence[str] = ()) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of candidates, each with the number of its first; of all columns, or of those named."""
        start = 0
        for batch in self._candidates.batches(names):
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
    names = ("item", "prompt_id", "held_out", "prompt_tokens", "mask", "cut", "messages")
    plain = {n: batch.column(n).to_pylist() for n in names}
    for i in np.flatnonzero(wanted):
        row, mask = ids[offsets[i] : offsets[i + 1]], plain["mask"][i]
        yield Candidate(
            item=plain["item"][i],
            prompt_id=plain["prompt_id"][i],
            split="held_out" if plain["held_out"][i] else "train",
            prompt_ids=row[: plain["prompt_tokens"][i]],
            messages=plain["messages"][i],
            given_ids=None if mask is None else row,
            given_mask=mask or b"",
            cut=plain["cut"][i],
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
