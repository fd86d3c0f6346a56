"""Rows of a source, as they were read, to what is kept of them while all sources are read: many at a time, so that they are
tokenised together, in this process or in others."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stages.corpus.candidates import asked_row, given_rows, ready_row
from stages.corpus.conversations import check_turns
from stages.corpus.grams import LEAK_WORDS, Grams, beside, grams_of_rows, word_hashes
from stages.corpus.items import Item, Message, Reject, RowFault
from stages.corpus.near import NEAR_WORDS, Signature, sketched
from stages.corpus.quality import later_words, prompt_words, system_words
from stages.corpus.ready import ReadyRows
from stages.corpus.rendering import Renderer
from stages.corpus.shapes import Ready
from stages.corpus.sift import ALIKE, REASONS, Fate
from stages.corpus.sources import Record, item_of
from stages.corpus.spool import Candidate, packed, place

if TYPE_CHECKING:
    from stages.contracts.params import Prepare, Source

_Outcome = list[Candidate | Reject]


@dataclass(frozen=True, eq=False)
class Taken:
    """What became of some rows of a source, in their order.

    `candidates` are packed for the spool, `count` of them; `rejects` each with its place. One value a candidate: `prompts`
    (12 bytes of its prompt id), `rows` (its row's or prompt's digest, u64), `held` (u8), `signatures` (u32 [count, 64]).
    `apart`: prompt ids and n-grams of the held-out ones; `later`: number among the candidates, prompt id and n-grams of
    what the user says further on in them.
    """

    read: int
    extra: int
    origin: bytes
    shapes: Counter[str]
    candidates: bytes
    count: int
    rejects: list[tuple[int, Reject]]
    prompts: bytes
    rows: npt.NDArray[np.uint64]
    held: npt.NDArray[np.uint8]
    signatures: Signature
    apart: list[tuple[str, Grams]]
    later: list[tuple[int, str, Grams]]


class Taker:
    """Takes rows in by the settings of prepare."""

    def __init__(self, prepare: Prepare, renderer: Renderer, ready: ReadyRows, apart: frozenset[str]) -> None:
        """`apart`: prompt ids that no source may give."""
        self._prepare, self._renderer, self._ready, self._apart = prepare, renderer, ready, apart

    @staticmethod
    def of_target(folder: Path, prepare: Prepare, apart: frozenset[str]) -> Taker:
        """The same taker, made where it is wanted."""
        return Taker(prepare, Renderer(folder, prepare.rendering), ReadyRows(folder), apart)

    def take(self, source: Source, records: Sequence[Record | Item | Reject], first: int) -> Taken:
        """`first`: the number of the first row within its source.

        Raises:
            DataError: a mask cannot be derived (rendering.py).
        """
        shapes: Counter[str] = Counter()
        items: list[Item | Reject] = []
        origin: list[bytes] = []
        for record in records:
            item, told, shape = item_of(record)
            items.append(item)
            origin.append(told)
            if shape:
                shapes[shape] += 1
        outcomes = self._outcomes(items, source)
        return self._kept(outcomes, first, b"".join(origin), shapes)

    def _outcomes(self, items: Sequence[Item | Reject], source: Source) -> list[_Outcome]:
        """The rows of each item, one unless the template takes several for a conversation; or why there is none."""
        outcomes: list[_Outcome] = [[] for _ in items]
        turns: list[tuple[int, Item]] = []
        for i, item in enumerate(items):
            if isinstance(item, Reject):
                outcomes[i] = [item]
                continue
            try:
                if isinstance(item, Ready):
                    outcomes[i] = [self._fit(self._ready_row(item, source))]
                else:
                    check_turns(item.messages, answered=source.answers == "given")
                    self._renderer.check_text(item.messages, item.tools)
                    turns.append((i, item))
            except RowFault as fault:
                outcomes[i] = [Reject(item.item, fault.reason, fault.detail)]
        for (i, item), made in zip(turns, self._rendered([t for _, t in turns], source), strict=True):
            if isinstance(made, RowFault):
                outcomes[i] = [Reject(item.item, made.reason, made.detail)]
            else:
                outcomes[i] = [self._fit(row) for row in made]
        return outcomes

    def _ready_row(self, item: Ready, source: Source) -> Candidate | Reject:
        renderer = self._renderer
        return ready_row(item, source, self._prepare, self._ready, renderer.end_ids, renderer.header)

    def _rendered(self, items: Sequence[Item], source: Source) -> list[_Outcome | RowFault]:
        prepare = self._prepare
        if source.answers == "given":
            given = self._renderer.given_many(
                [(item.messages, item.tools) for item in items], lambda i: f"source {source.name}, {items[i].item}"
            )
            return [
                rows if isinstance(rows, RowFault) else given_rows(item, rows, prepare, self._renderer.end_ids)
                for item, rows in zip(items, given, strict=True)
            ]
        asked = [item.asked() for item in items]
        prompts = self._renderer.prompt_many([(item.messages, item.tools) for item in asked])
        return [
            ids if isinstance(ids, RowFault) else [asked_row(item, ids, prepare)]
            for item, ids in zip(asked, prompts, strict=True)
        ]

    def _fit(self, row: Candidate | Reject) -> Candidate | Reject:
        if isinstance(row, Candidate):
            n = len(row.prompt_ids)
            if n > self._prepare.max_prompt_tokens:
                return Reject(row.item, "prompt too long", f"{n} tokens", row.prompt_id)
            if row.prompt_id in self._apart:
                return Reject(row.item, REASONS[Fate.DUPLICATE], ALIKE[Fate.DUPLICATE], row.prompt_id)
        return row

    def _kept(self, outcomes: Sequence[_Outcome], first: int, origin: bytes, shapes: Counter[str]) -> Taken:
        placed = [(place(first + i, k), k, one) for i, of in enumerate(outcomes) for k, one in enumerate(of)]
        rows = [(at, k, one) for at, k, one in placed if isinstance(one, Candidate)]
        candidates = [one for _, _, one in rows]
        hashes = [word_hashes(prompt_words(one.turns)) for one in candidates]
        leak = grams_of_rows(hashes, LEAK_WORDS)
        # a further row of a conversation is near its first by nature, so it is compared with no other
        last = {
            at >> 20: i for i, (at, _, _) in enumerate(rows)
        }  # of a conversation's rows the one that holds most of it
        whole, later = _beside([one.turns for one in candidates], leak)
        close = grams_of_rows([h[:0] if k else h for h, (_, k, _) in zip(hashes, rows, strict=True)], NEAR_WORDS)
        return Taken(
            read=len(outcomes),
            extra=len(placed) - len(outcomes),
            origin=origin,
            shapes=shapes,
            candidates=packed([at for at, _, _ in rows], candidates, whole),
            count=len(rows),
            rejects=[(at, one) for at, _, one in placed if isinstance(one, Reject)],
            prompts=bytes.fromhex("".join(one.prompt_id for one in candidates)),
            rows=np.asarray([int(one.whole_id[:16], 16) for one in candidates], np.uint64),
            held=np.asarray([one.split == "held_out" for one in candidates], np.uint8),
            signatures=sketched(close, [int(one.prompt_id[:8], 16) for one in candidates]),
            apart=[
                (one.prompt_id, words)
                for one, words in zip(candidates, leak, strict=True)
                if one.split == "held_out" and len(words)
            ],
            later=[
                (i, one.prompt_id, later[i])
                for i, one in enumerate(candidates)
                if one.split == "held_out" and i in later and last[rows[i][0] >> 20] == i
            ],
        )


def _beside(turns: Sequence[Sequence[Message]], of_prompts: Sequence[Grams]) -> tuple[list[Grams], dict[int, Grams]]:
    """N-grams of all that a row holds and is not answered: of its prompt, system texts and later turns, each for itself; and
    by row those of later turns alone, short ones left out."""
    texts = [(i, late, w) for i, of in enumerate(turns) for late, w in _texts_beside(of)]
    found = grams_of_rows([word_hashes(w) for _, _, w in texts], LEAK_WORDS)
    whole, later = [[of] for of in of_prompts], {}
    for (i, late, words), of in zip(texts, found, strict=True):
        short = len(words) < LEAK_WORDS
        whole[i].append(beside(of) if short else of)
        if late and not short:
            later.setdefault(i, []).append(of)
    joined = [of[0] if len(of) == 1 else np.unique(np.concatenate(of)) for of in whole]
    return joined, {i: np.unique(np.concatenate(of)) for i, of in later.items()}


def _texts_beside(turns: Sequence[Message]) -> list[tuple[bool, list[str]]]:
    """Texts beside a prompt as words, and whether each is a later turn."""
    return [(False, w) for w in system_words(turns)] + [(True, w) for w in later_words(turns)]


_taker: Taker | None = None


def begin(folder: Path, prepare: Prepare, apart: frozenset[str]) -> None:
    """Make this process's own taker."""
    global _taker
    _taker = Taker.of_target(folder, prepare, apart)
    gc.freeze()  # what stays for good is not looked through at each collection


def take(source: Source, records: Sequence[Any], first: int) -> Taken:
    """`Taker.take` by this process's own taker."""
    assert _taker is not None
    return _taker.take(source, records, first)
