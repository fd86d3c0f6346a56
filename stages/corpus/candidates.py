"""Items to candidates: what a conversation, or a row that stands ready, gives under the settings of prepare."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stages.corpus.grams import LEAK_WORDS, words_of
from stages.corpus.items import Item, Message, Reject
from stages.corpus.quality import has_supervised_pair, prompt_words, repeats_itself
from stages.corpus.ready import ReadyRows
from stages.corpus.rendering import GivenRow, Renderer
from stages.corpus.shapes import Ready
from stages.corpus.split import prompt_id, row_id, split_of
from stages.corpus.spool import Candidate, Given

if TYPE_CHECKING:
    from stages.contracts.params import Prepare, Source

_LONG_ANSWERS = re.compile(rb"\x01{24,}")  # of fewer tokens none is called a loop


def asked(item: Item, prepare: Prepare, renderer: Renderer) -> Candidate:
    """The prompt that a regenerated answer goes on from.

    Raises:
        RowFault: the template refuses it.
    """
    item = item.asked()
    return asked_row(item, renderer.prompt(item.messages, item.tools), prepare)


def asked_row(item: Item, ids: npt.ArrayLike, prepare: Prepare) -> Candidate:
    """The prompt `item`, which has the token ids `ids` [T]."""
    array = np.asarray(ids, np.int32)
    return _make(item.item, prompt_id(array), array, item.messages, prepare)


def given_rows(
    item: Item, rows: Sequence[GivenRow], prepare: Prepare, end_ids: frozenset[int]
) -> list[Candidate | Reject]:
    """Rows with the answers they came with; beyond max_row_tokens a row is cut, and counts as capped where an answer was. A conversation's rows
    keep to one side of the split, that of its first prompt."""
    first = rows[0]
    side = prompt_id(first.ids[: first.prompt_tokens])
    taken: list[Candidate | Reject] = []
    for i, row in enumerate(rows):
        name = f"{item.item}#{row.messages}" if i else item.item
        taken.append(_cut(name, row.ids, row.mask, item.messages[: row.messages], prepare, side, end_ids))
    return taken


def ready_row(
    item: Ready, source: Source, prepare: Prepare, ready: ReadyRows, end_ids: frozenset[int], header: str
) -> Candidate | Reject:
    """The row of an item that is past its rendering; its messages are what its tokens say.

    Raises:
        RowFault: its ids are not the target's, or nothing tells its answers from its prompt, or where one begins.
    """
    if source.answers == "regenerate":
        ids = ready.prompt(item, header)
        if not ids:
            return Reject(item.item, "no prompt", "its first token is supervised")
        return _make(
            item.item,
            prompt_id(ids),
            np.asarray(ids, np.int32),
            [{"role": "user", "content": ready.said(ids)}],
            prepare,
        )
    ids, mask = ready.whole(item)
    start = mask.index(1) if 1 in mask else len(mask)
    if not start:
        return Reject(item.item, "no prompt", "its first token is supervised")
    turns = [{"role": "user", "content": ready.said(ids[:start])}]
    turns.append({"role": "assistant", "content": ready.said(ids[start:])})
    array = np.asarray(ids, np.int32)
    row = _cut(item.item, array, bytes(mask), turns, prepare, prompt_id(array[:start]), end_ids)
    if isinstance(row, Reject):
        return row
    later = [{"role": "user", "content": ready.said(ids[a:b])} for a, b in _unsupervised(mask, start)]
    return replace(row, turns=[*turns, *later]) if later else row


def _unsupervised(mask: Sequence[int], start: int) -> list[tuple[int, int]]:
    """The stretches behind `start` that are no answer, [first, end), and long enough to tell a leak."""
    cuts = np.flatnonzero(np.diff(np.asarray([1, *mask[start:], 1], np.int8))) + start
    return [(a, b) for a, b in zip(cuts[::2].tolist(), cuts[1::2].tolist(), strict=True) if b - a >= LEAK_WORDS]


def _cut(
    item: str,
    ids: npt.NDArray[np.int32],
    mask: bytes,
    messages: Sequence[Message],
    prepare: Prepare,
    side: str,
    end_ids: frozenset[int],
) -> Candidate | Reject:
    learnt = mask[: prepare.max_row_tokens]
    if not has_supervised_pair(learnt):
        return Reject(item, "no supervised pair", f"{sum(learnt)} answer tokens within {prepare.max_row_tokens}")
    kept = ids[: prepare.max_row_tokens]
    cut = mask.find(1, prepare.max_row_tokens) >= 0  # what follows the last answer is no loss
    whole = Given(kept, learnt, cut, row_id(kept, learnt), _loops(kept, learnt, end_ids))
    return _make(item, side, kept[: learnt.index(1)], messages, prepare, whole)


def _loops(ids: npt.NDArray[np.int32], mask: bytes, end_ids: frozenset[int]) -> bool:
    """Whether an answer of a row loops."""
    for run in _LONG_ANSWERS.finditer(mask):
        answer = ids[run.start() : run.end()]
        for end in end_ids:
            answer = answer[answer != end]
        if repeats_itself(answer):
            return True
    return False


def _make(
    item: str,
    side: str,
    prompt_ids: npt.NDArray[np.int32],
    messages: Sequence[Message],
    prepare: Prepare,
    given: Given | None = None,
) -> Candidate:
    """`side`: the prompt id that decides the split."""
    split = split_of(side, prepare.seed, prepare.held_out_share)
    told = Candidate.messages_of(messages)
    return Candidate(item, prompt_id(prompt_ids), split, prompt_ids, told, given, messages)


def asked_words(item: Item, ready: ReadyRows) -> list[str]:
    """The words of a prompt, from a row of any shape."""
    if isinstance(item, Ready):
        return words_of(item.text if item.text is not None else ready.said(ready.prompt(item)))
    return prompt_words(item.messages)
