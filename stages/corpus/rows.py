"""Candidates and answers to rows, and rows to parquet files that are byte-identical when the rows are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.corpus.answers import UNANSWERED, Generated
from stages.corpus.items import Reject, RowFault
from stages.corpus.quality import has_supervised_pair, repeats_itself
from stages.corpus.split import Split, row_id
from stages.corpus.spool import Candidate

if TYPE_CHECKING:
    from stages.contracts.params import Prepare

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


def given_row(candidate: Candidate, prepare: Prepare) -> dict[str, Any]:
    """The row as it came; whose answers these are is not known, so they do not count as on-policy.

    Raises:
        RowFault: cut or repetitive beyond what the policy keeps.
    """
    given = candidate.given
    assert given is not None
    if given.cut and prepare.capped == "drop":
        raise RowFault("capped", f"longer than {prepare.max_row_tokens} tokens")
    return {
        "input_ids": given.ids,
        "loss_mask": np.frombuffer(given.mask, np.uint8),
        "finish": "capped" if given.cut else "given",
        "repetitive": _looped(given.loops, prepare),
        "on_policy": False,
        "messages": candidate.messages,
    }


def _looped(loops: bool, prepare: Prepare) -> bool:
    if loops and prepare.repetitive == "drop":
        raise RowFault("repeats itself")
    return loops


def make_row(
    candidate: Candidate,
    answers: Mapping[str, Generated],
    source: Any,
    prepare: Prepare,
    end_ids: frozenset[int],
    decode: Callable[[Any], str],
) -> Row | Reject:
    """The row of a candidate, or the reason why there is none."""
    try:
        if candidate.given is None:
            parts = regenerated_row(candidate, answers[candidate.prompt_id], prepare, end_ids, decode)
        else:
            parts = given_row(candidate, prepare)
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


class TableWriter:
    """A zstd parquet file of dataclasses or dicts, a row group each 1024 rows, so that memory does not grow with them."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", version="2.6")
        self._group: list[dict[str, Any]] = []

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._writer.write_table(_table(self._group, self._schema))
        self._writer.close()

    def add(self, row: Any) -> None:
        self._group.append(row if isinstance(row, dict) else vars(row))
        if len(self._group) == _GROUP_ROWS:
            self._writer.write_table(_table(self._group, self._schema))
            self._group = []


def write_table(path: Path, schema: pa.Schema, rows: Iterable[Any]) -> None:
    """Write all of `rows` as a table."""
    with TableWriter(path, schema) as writer:
        for row in rows:
            writer.add(row)


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    columns = [pa.array([r[f.name] for r in rows], f.type) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)
