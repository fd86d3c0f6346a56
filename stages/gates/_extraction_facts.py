"""Prepared rows as counts and comparisons that plain expectations can judge, taken a frame at a time: what is held of all
rows is their sums and some numbers a row, and in full only the rows that a judgement can turn on."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stages.gates._extraction_evidence import Evidence
from stages.gates._judge import Expectation
from stages.gates._sieve import telling

if TYPE_CHECKING:
    from pandas import DataFrame

_TAKEN = (
    "row_id",
    "prompt_id",
    "source",
    "domain",
    "split",
    "finish",
    "repetitive",
    "on_policy",
    "prompt_tokens",
)
_TELLING_WORDS = 8  # that stand in two texts are seldom chance
_COUNTED = ("tokens", "mask_tokens", "lowest_id", "highest_id", "strange_mask_values", "supervised_tokens")
_COMPARED = ("longest_supervised_run", "first_supervised_token", "recomputed_row_id", "recomputed_prompt_id")
_FACTS = [*_TAKEN, *_COUNTED, *_COMPARED, "begins_as_the_template", "opening_bos"]
_COLUMNS = [*_FACTS, "splits_of_prompt"]


@dataclass
class Facts:
    """What is said of all rows: `table` holds the telling ones of them, `rows` is how many there are."""

    table: DataFrame
    rows: int = 0
    held_out_rows: int = 0
    train_supervised_tokens: int = 0
    supervised_tokens: int = 0
    on_policy_tokens: int = 0
    repetitive_rows: float = 0.0
    shared_prompts: list[str] = field(default_factory=list)
    of_source: dict[str, Counter[str]] = field(default_factory=dict)


def row_facts(evidence: Evidence, expectations: Sequence[Expectation]) -> Facts:
    """Facts of all rows; `expectations` are those that the table will be judged by."""
    import pandas as pd

    splits = _Splits(evidence)
    found = Facts(pd.DataFrame(columns=_COLUMNS))
    said = _Said()
    kept: list[DataFrame] = []
    for rows in _frames(evidence, None):
        frame = pd.DataFrame([_facts(row, evidence) for row in rows.to_dict("records")], columns=_FACTS)
        frame["splits_of_prompt"] = splits.of_prompts(frame["prompt_id"])
        _count(found, frame)
        said.take(rows)
        again = splits.doubled(frame["row_id"], frame["prompt_id"])
        if len(frame):
            kept.append(_of(frame, telling(frame, expectations) | again))
    if kept:
        table = pd.concat(kept, ignore_index=True)
        again = splits.doubled(table["row_id"], table["prompt_id"])
        found.table = _of(table, telling(table, expectations) | again)
    found.shared_prompts = said.shared()
    return found


def _of(frame: Any, keep: npt.NDArray[np.bool_]) -> DataFrame:
    return frame[keep].reset_index(drop=True)


def _frames(evidence: Evidence, columns: Sequence[str] | None) -> Iterator[DataFrame]:
    import pandas as pd

    if isinstance(evidence.rows, pd.DataFrame):
        whole: Any = evidence.rows
        yield whole if columns is None else whole[list(columns)]
    else:
        yield from evidence.rows.read(columns)


def _count(found: Facts, frame: Any) -> None:
    train, held = frame["split"] == "train", frame["split"] == "held_out"
    tokens = frame["supervised_tokens"]
    found.rows += len(frame)
    found.held_out_rows += int(held.sum())
    found.train_supervised_tokens += int(tokens[train].sum())
    found.supervised_tokens += int(tokens.sum())
    found.on_policy_tokens += int(tokens[frame["on_policy"].astype(bool)].sum())
    found.repetitive_rows += float(frame["repetitive"].astype(float).sum())
    for name, rows in frame.groupby("source"):
        of = found.of_source.setdefault(str(name), Counter())
        of["rows"] += len(rows)
        of["supervised_tokens"] += int(rows["supervised_tokens"].sum())
        of["capped"] += int((rows["finish"] == "capped").sum())


class _Splits:
    """Which names are there twice, and in how many splits a prompt stands; by 64 bits of each name."""

    def __init__(self, evidence: Evidence) -> None:
        ids: dict[str, list[npt.NDArray[np.uint64]]] = {"row_id": [], "prompt_id": []}
        splits: list[npt.NDArray[np.uint64]] = []
        for frame in _frames(evidence, ("row_id", "prompt_id", "split")):
            for name, of in ids.items():
                of.append(_numbers(frame[name]))
            splits.append(_numbers(frame["split"]))
        rows, prompts, split = (np.concatenate([_NONE, *parts]) for parts in (ids["row_id"], ids["prompt_id"], splits))
        self._rows, self._prompts = (_twice(of) for of in (rows, prompts))
        again = np.isin(prompts, self._prompts)
        pairs = {(int(p), int(s)) for p, s in zip(prompts[again], split[again], strict=True)}
        self._splits = Counter(p for p, _ in pairs)

    def of_prompts(self, prompts: Any) -> list[int]:
        return [self._splits.get(int(p), 1) for p in _numbers(prompts)]

    def doubled(self, rows: Any, prompts: Any) -> npt.NDArray[np.bool_]:
        return np.isin(_numbers(rows), self._rows) | np.isin(_numbers(prompts), self._prompts)


_NONE = np.zeros(0, np.uint64)


def _numbers(names: Any) -> npt.NDArray[np.uint64]:
    return np.fromiter((_number(str(n)) for n in names), np.uint64, len(names))


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _twice(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    found, counts = np.unique(numbers, return_counts=True)
    return found[counts > 1]


class _Said:
    """What prompts say, after normalisation: 64 bits of each, and the names of the held-out rows. A held-out prompt of some
    words is also looked for in the later turns and system texts of training rows."""

    def __init__(self) -> None:
        self._train: list[npt.NDArray[np.uint64]] = [_NONE]
        self._held: list[tuple[str, list[int]]] = []

    def take(self, rows: Any) -> None:
        train: list[str] = []
        for name, split, messages in zip(rows["row_id"], rows["split"], rows["messages"], strict=True):
            prompt, asked, beside = normalised(messages)
            if split == "train":
                train += [prompt, *asked, *beside]
            elif split == "held_out":
                self._held.append((name, [_number(text) for text in (prompt, *asked)]))
        self._train.append(_numbers(train))

    def shared(self) -> list[str]:
        """Held-out rows whose prompt is also a training prompt, or a later turn or system text of a training row."""
        flat = np.array([n for _, numbers in self._held for n in numbers], np.uint64)
        both = set(flat[np.isin(flat, np.concatenate(self._train))].tolist())
        return [row for row, numbers in self._held if not both.isdisjoint(numbers)]


def normalised(messages: str) -> tuple[str, list[str], list[str]]:
    """Of a conversation, without case, spacing or punctuation: roles and words before the first answer; the user's words
    there; and each system text and later turn of the user. Of the last two, those with words enough to be no chance."""
    turns: list[str] = []
    asked: list[str] = []
    beside: list[str] = []
    answered = False
    for message in json.loads(messages):
        role, content = message.get("role"), message.get("content")
        answered = answered or role == "assistant"
        if answered and role != "user":
            continue
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        words = re.findall(r"\w+", text.lower())
        if not answered:
            turns.append(f"{role}: {' '.join(words)}")
        if role == "user" and not answered:
            asked += words
        elif role in ("user", "system", "developer"):
            beside += [" ".join(words)] if len(words) >= _TELLING_WORDS else []
    return "\n".join(turns), [" ".join(asked)] if len(asked) >= _TELLING_WORDS else [], beside


def _facts(row: dict[str, Any], evidence: Evidence) -> dict[str, Any]:
    ids, mask = np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], np.uint8)
    prefix = evidence.template_prefix
    supervised = np.flatnonzero(mask)
    first = int(supervised[0]) if len(supervised) else -1
    return {
        **{k: row[k] for k in _TAKEN},
        "tokens": len(ids),
        "mask_tokens": len(mask),
        "lowest_id": int(ids.min(initial=0)),
        "highest_id": int(ids.max(initial=0)),
        "strange_mask_values": int((mask > 1).sum()),
        "supervised_tokens": int((mask == 1).sum()),
        "longest_supervised_run": _longest_run(mask),
        "first_supervised_token": first,
        "recomputed_row_id": hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()[:24],
        "recomputed_prompt_id": hashlib.sha256(ids[: row["prompt_tokens"]].tobytes()).hexdigest()[:24],
        "begins_as_the_template": tuple(ids[: len(prefix)].tolist()) == prefix,
        "opening_bos": opening_bos(ids, evidence.bos_id),
    }


def _longest_run(mask: np.ndarray) -> int:
    edges = np.diff(np.concatenate([[0], (mask == 1).astype(np.int8), [0]]))
    return int((np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)).max(initial=0))


def opening_bos(ids: np.ndarray, bos: int | None) -> int:
    """How many beginning-of-sequence tokens the row opens with."""
    others = np.flatnonzero(ids != (-1 if bos is None else bos))
    return int(others[0]) if len(others) else len(ids)
