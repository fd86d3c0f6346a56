"""Items to candidates: what a conversation, or a row that stands ready, gives under the settings of prepare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stages.corpus.conversations import prompt_of
from stages.corpus.grams import words_of
from stages.corpus.items import Item, Message, Reject
from stages.corpus.quality import has_supervised_pair, prompt_words
from stages.corpus.ready import ReadyRows
from stages.corpus.rendering import Renderer
from stages.corpus.shapes import Ready
from stages.corpus.split import prompt_id, split_of
from stages.corpus.spool import Candidate

if TYPE_CHECKING:
    from stages.contracts.params import Prepare, Source


def asked(item: Item, prepare: Prepare, renderer: Renderer) -> Candidate:
    """The prompt that a regenerated answer goes on from.

    Raises:
        RowFault: the template refuses it.
    """
    messages = prompt_of(item.messages)
    ids = np.asarray(renderer.prompt(messages, item.tools), np.int32)
    return _make(item.item, prompt_id(ids), ids, messages, prepare)


def given_rows(item: Item, prepare: Prepare, renderer: Renderer) -> list[Candidate | Reject]:
    """Rows with the answers they came with; beyond max_row_tokens a row is cut and counts as capped. A conversation's rows
    keep to one side of the split, that of its first prompt."""
    rows = renderer.given(item.messages, item.tools)
    side = prompt_id(rows[0].ids[: rows[0].prompt_tokens])
    taken: list[Candidate | Reject] = []
    for i, row in enumerate(rows):
        name = f"{item.item}#{row.messages}" if i else item.item
        taken.append(_cut(name, row.ids, row.mask, item.messages[: row.messages], prepare, side))
    return taken


def ready_row(item: Ready, source: Source, prepare: Prepare, ready: ReadyRows) -> Candidate | Reject:
    """The row of an item that is past its rendering; its messages are what its tokens say.

    Raises:
        RowFault: its ids are not the target's, or nothing tells its answers from its prompt.
    """
    if source.answers == "regenerate":
        ids = ready.prompt(item)
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
    return _cut(item.item, ids, mask, turns, prepare, prompt_id(ids[:start]))


def _cut(
    item: str, ids: Sequence[int], mask: Sequence[int], messages: Sequence[Message], prepare: Prepare, side: str
) -> Candidate | Reject:
    learnt = bytes(mask[: prepare.max_row_tokens])
    if not has_supervised_pair(learnt):
        return Reject(item, "no supervised pair", f"{sum(learnt)} answer tokens within {prepare.max_row_tokens}")
    kept = np.asarray(ids[: prepare.max_row_tokens], np.int32)
    whole = (kept, learnt, len(ids) > len(kept))
    return _make(item, side, kept[: learnt.index(1)], messages, prepare, whole)


def _make(
    item: str,
    side: str,
    prompt_ids: npt.NDArray[np.int32],
    messages: Sequence[Message],
    prepare: Prepare,
    whole: tuple[npt.NDArray[np.int32] | None, bytes, bool] = (None, b"", False),
) -> Candidate:
    """`side`: the prompt id that decides the split; `whole`: ids and mask of a row with its answers, and whether it was
    cut."""
    return Candidate(
        item,
        prompt_id(prompt_ids),
        split_of(side, prepare.seed, prepare.held_out_share),
        prompt_ids,
        Candidate.messages_of(messages),
        *whole,
        messages,
    )


def asked_words(item: Item, ready: ReadyRows) -> list[str]:
    """The words of a prompt, from a row of any shape."""
    if isinstance(item, Ready):
        return words_of(item.text if item.text is not None else ready.said(ready.prompt(item)))
    return prompt_words(item.messages)
