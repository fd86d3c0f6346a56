"""Candidates and answers to rows, and rows to parquet files that are byte-identical when the rows are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stages.corpus.answers import UNANSWERED, Generated
from stages.corpus.items import Reject, RowFault
from stages.corpus.quality import has_supervised_pair, repeats_itself
from stages.corpus.split import Split, row_id
from stages.corpus.spool import Candidate

if TYPE_CHECKING:
    from stages.contracts.params import Prepare, Source

_GROUP_ROWS = 1024
_THOUGHTS = re.compile(r"<think>.*?</think>|^.*?</think>|<think>.*\Z", re.DOTALL)

ROWS = pa.schema(
    [
        ("row_id", pa.string()),
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("prompt_tokens", pa.int32()),
        ("finish", pa.string()),
        ("repetitive", pa.bool_()),
        ("on_policy", pa.bool_()),
        ("messages", pa.string()),
    ]
)
OUT_OF_DISTRIBUTION = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("messages", pa.string()),
    ]
)
REJECTS = pa.schema([(name, pa.string()) for name in ("source", "prompt_id", "item", "reason", "detail")])


@dataclass(frozen=True)
class Row:
    """One row of rows.parquet; `input_ids` i32 [T] and `loss_mask` u8 [T]."""

    row_id: str
    prompt_id: str
    source: str
    domain: str
    split: Split
    input_ids: np.ndarray
    loss_mask: np.ndarray
    prompt_tokens: int
    finish: Literal["stop", "capped", "given"]
    repetitive: bool
    on_policy: bool
    messages: str


def regenerated_row(
    candidate: Candidate, answer: Generated, prepare: Prepare, end_ids: frozenset[int], decode: Callable[[Any], str]
) -> dict[str, Any]:
    """Prompt ids and answer ids as they were generated; every answer token is supervised, the end of turn included.

    Raises:
        RowFault: the answer is empty, capped or repetitive beyond what the policy keeps, or too short to learn from; or
            there is none.
    """
    if answer.finish in UNANSWERED:
        raise RowFault(UNANSWERED[answer.finish], answer.detail)
    text = decode(answer.ids)
    capped = answer.finish == "length"
    said = text if capped else _THOUGHTS.sub("", text)
    if not said.strip():
        raise RowFault("empty answer", "only reasoning" if text.strip() else f"{len(answer.ids)} tokens")
    if capped and prepare.capped == "drop":
        raise RowFault("capped", f"{len(answer.ids)} tokens without an end of turn")
    ids = np.concatenate([candidate.prompt_ids, np.asarray(answer.ids, np.int32)])
    mask = np.zeros(len(ids), np.uint8)
    mask[len(candidate.prompt_ids) :] = 1
    messages = [*json.loads(candidate.messages), {"role": "assistant", "content": text}]
    return {
        "input_ids": ids,
        "loss_mask": mask,
        "finish": "capped" if capped else "stop",
        "repetitive": _looped(repeats_itself([i for i in answer.ids if i not in end_ids]), prepare),
        "on_policy": True,
        "messages": json.dumps(messages, ensure_ascii=False),
    }


def given_rows(
    batch: pa.RecordBatch, wanted: npt.NDArray[np.bool_], source: Source, prepare: Prepare
) -> tuple[pa.RecordBatch, list[Reject]]:
    """The rows of a batch of candidates that came with their answers, as columns of ROWS; and those that the policies for
    cut and repetitive answers leave out. Whose answers these are is not known, so they do not count as on-policy.

    Args:
        wanted: which of the candidates stay, bool [rows].
    """
    cut, loops = (batch.column(n).to_numpy(zero_copy_only=False).astype(bool) for n in ("cut", "loops"))
    dropped = {
        "capped": cut & (prepare.capped == "drop"),
        "repeats itself": loops & ~(cut & (prepare.capped == "drop")) & (prepare.repetitive == "drop"),
    }
    rejects: list[tuple[int, Reject]] = []
    for reason, which in dropped.items():
        detail = f"longer than {prepare.max_row_tokens} tokens" if reason == "capped" else ""
        for i in np.flatnonzero(which & wanted):
            item, prompt = batch.column("item")[i].as_py(), batch.column("prompt_id")[i].as_py()
            rejects.append((int(i), Reject(item, reason, detail, prompt)))
    kept = wanted & ~dropped["capped"] & ~dropped["repeats itself"]
    rows = batch if kept.all() else batch.filter(pa.array(kept))
    cut, held = cut[kept], rows.column("held_out").to_numpy(zero_copy_only=False).astype(bool)
    count = rows.num_rows
    columns = {
        "row_id": rows.column("row_id"),
        "prompt_id": rows.column("prompt_id"),
        "source": pa.repeat(source.name, count),
        "domain": pa.repeat(source.domain, count),
        "split": pa.array(np.where(held, "held_out", "train").tolist(), pa.string()),
        "input_ids": rows.column("ids"),
        "loss_mask": _bytes_as_lists(rows.column("mask")),
        "prompt_tokens": rows.column("prompt_tokens"),
        "finish": pa.array(np.where(cut, "capped", "given").tolist(), pa.string()),
        "repetitive": rows.column("loops"),
        "on_policy": pa.array(np.zeros(count, bool)),
        "messages": rows.column("messages"),
    }
    made = pa.record_batch([columns[f.name] for f in ROWS], schema=ROWS)
    return made, [reject for _, reject in sorted(rejects, key=lambda r: r[0])]


def _bytes_as_lists(column: Any) -> pa.ListArray:
    """Bytes as lists of u8."""
    _, ends, flat = column.buffers()
    offsets = np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1]
    values = np.frombuffer(flat or b"", np.uint8)[offsets[0] : offsets[-1]]
    return pa.ListArray.from_arrays(pa.array(offsets - offsets[0]), pa.array(values))


def _looped(loops: bool, prepare: Prepare) -> bool:
    if loops and prepare.repetitive == "drop":
        raise RowFault("repeats itself")
    return loops


def answered_rows(
    candidates: Iterable[Candidate],
    answers: Mapping[str, Generated],
    source: Source,
    prepare: Prepare,
    end_ids: frozenset[int],
    decode: Callable[[Any], str],
) -> tuple[pa.RecordBatch, list[Reject]]:
    """The rows of candidates whose answers the target gave, as columns of ROWS; and those of which there is none."""
    made = [_answered(c, answers, source, prepare, end_ids, decode) for c in candidates]
    return columns_of(r for r in made if isinstance(r, Row)), [r for r in made if isinstance(r, Reject)]


def _answered(
    candidate: Candidate,
    answers: Mapping[str, Generated],
    source: Source,
    prepare: Prepare,
    end_ids: frozenset[int],
    decode: Callable[[Any], str],
) -> Row | Reject:
    try:
        parts = regenerated_row(candidate, answers[candidate.prompt_id], prepare, end_ids, decode)
        if not has_supervised_pair(parts["loss_mask"].tobytes()):
            raise RowFault("no supervised pair", f"{int(parts['loss_mask'].sum())} answer tokens")
    except RowFault as fault:
        return Reject(candidate.item, fault.reason, fault.detail, candidate.prompt_id)
    return Row(
        row_id=row_id(parts["input_ids"], parts["loss_mask"].tobytes()),
        prompt_id=candidate.prompt_id,
        source=source.name,
        domain=source.domain,
        split=candidate.split,
        prompt_tokens=len(candidate.prompt_ids),
        **parts,
    )


def columns_of(rows: Iterable[Row]) -> pa.RecordBatch:
    """Rows as columns of ROWS."""
    return _columns([vars(row) for row in rows], ROWS)


class TableWriter:
    """A zstd parquet file of dataclasses or dicts, or of columns; a row group each 1024 rows, so that memory does not grow
    with them. Groups are packed by a thread of its own while the next rows are made."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", version="2.6")
        self._group: list[dict[str, Any]] = []
        self._batches: list[pa.RecordBatch] = []
        self._rows = self._written = 0
        self._thread = ThreadPoolExecutor(1)
        self._packing: Future[None] | None = None

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._take_group()
                if self._rows or not self._written:
                    self._write(self._rows)
                self._wait()
        finally:
            self._thread.shutdown()
            self._writer.close()

    def add(self, row: Any) -> None:
        self._group.append(row if isinstance(row, dict) else vars(row))
        if len(self._group) == _GROUP_ROWS:
            self._take_group()

    def add_columns(self, batch: pa.RecordBatch) -> None:
        """Rows as columns of the schema."""
        self._take_group()
        self._put(batch)

    def _take_group(self) -> None:
        group, self._group = self._group, []
        if group:
            self._put(_columns(group, self._schema))

    def _put(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._rows += batch.num_rows
        while self._rows >= _GROUP_ROWS:
            self._write(_GROUP_ROWS)

    def _write(self, count: int) -> None:
        table = pa.Table.from_batches(self._batches, self._schema)
        rest = table.slice(count)
        self._batches, self._rows = rest.to_batches(), rest.num_rows
        self._written += count
        self._wait()
        self._packing = self._thread.submit(self._pack, table.slice(0, count))

    def _pack(self, table: pa.Table) -> None:
        self._writer.write_table(table.combine_chunks())

    def _wait(self) -> None:
        if self._packing is not None:
            self._packing.result()


def write_table(path: Path, schema: pa.Schema, rows: Iterable[Any]) -> None:
    """Write all of `rows` as a table."""
    with TableWriter(path, schema) as writer:
        for row in rows:
            writer.add(row)


def _columns(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.record_batch([pa.array([r[f.name] for r in rows], f.type) for f in schema], schema=schema)
