"""From sources to candidates: prompts that fit, each once, on its side of the split, none giving a held-out one away."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stages.contracts.errors import DataError
from stages.contracts.progress import progress
from stages.corpus.conversations import check_turns, prompt_of
from stages.corpus.items import Item, Message, Reject, RowFault
from stages.corpus.quality import SHARED, has_supervised_pair, prompt_text, shared_text
from stages.corpus.rendering import Rendered, Renderer
from stages.corpus.sources import Reading, general_knowledge
from stages.corpus.split import Split, prompt_id, split_of

if TYPE_CHECKING:
    from stages.contracts.params import Prepare, Source


@dataclass(frozen=True)
class Candidate:
    """A prompt that may become a row. `given_ids` and `given_mask` hold the whole row when its answers came with it."""

    item: str
    prompt_id: str
    split: Split
    prompt_ids: np.ndarray
    messages: str
    text: str
    given_ids: np.ndarray | None = None
    given_mask: bytes = b""
    cut: bool = False


@dataclass
class Gathered:
    """What was read of one source. extra_rows: beyond the first of each conversation that takes several."""

    source: Source
    origin_digest: str = ""
    rows_read: int = 0
    extra_rows: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)


def gather(prepare: Prepare, renderer: Renderer) -> tuple[list[Gathered], list[Candidate]]:
    """Read all sources in their order, and the out-of-distribution prompts.

    Raises:
        DataError: a source is not there or gives nothing, or a mask cannot be derived (rendering.py).
    """
    seen: set[str] = set()
    apart = list(_out_of_distribution(prepare, renderer, seen))
    gathered = []
    with progress(sum(s.limit for s in prepare.sources), "prompts", "read") as advance:
        for source in prepare.sources:
            reading = Reading(source, prepare.seed, prepare.max_prompt_tokens)
            of_source = Gathered(source)
            for item in reading:
                advance(1, source.name)
                taken = [item] if isinstance(item, Reject) else _candidates(item, source, prepare, renderer, seen)
                of_source.extra_rows += len(taken) - 1
                of_source.candidates += [one for one in taken if isinstance(one, Candidate)]
                of_source.rejects += [one for one in taken if isinstance(one, Reject)]
            of_source.origin_digest, of_source.rows_read = reading.origin_digest, reading.rows_read
            gathered.append(of_source)
    _drop_leaks(gathered, apart)
    for of_source in gathered:
        demand_rows(of_source.source.name, len(of_source.candidates), of_source.rejects)
    return gathered, apart


def demand_rows(source: str, rows: int, rejects: Sequence[Reject]) -> None:
    """Raises DataError when nothing of a source is left: the line would train and measure without its domain."""
    if rows:
        return
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(Counter(r.reason for r in rejects).items()))
    first = (
        f"; the first is {rejects[0].item}: {rejects[0].reason} {rejects[0].detail[:80]}".rstrip() if rejects else ""
    )
    raise DataError(
        f"No row of source {source} was accepted",
        where=f"params.yaml: prepare.sources, {source}",
        expected="at least one row",
        got=f"{len(rejects)} read: {reasons}{first}" if rejects else "nothing to read: the source is empty",
        do="mend the source, or take it out of prepare.sources",
    )


def _candidates(
    item: Item, source: Source, prepare: Prepare, renderer: Renderer, seen: set[str]
) -> list[Candidate | Reject]:
    """What an item gives, each a candidate or the reason why it is none; at least one."""
    try:
        check_turns(item.messages, answered=source.answers == "given")
        renderer.check_text(item.messages, item.tools)
        made = _given(item, prepare, renderer) if source.answers == "given" else [_prompt(item, prepare, renderer)]
    except RowFault as fault:
        return [Reject(item.item, fault.reason, fault.detail)]
    return [one if isinstance(one, Reject) else _fitting(one, prepare, seen) for one in made]


def _fitting(candidate: Candidate, prepare: Prepare, seen: set[str]) -> Candidate | Reject:
    prompt, tokens = candidate.prompt_id, len(candidate.prompt_ids)
    if tokens > prepare.max_prompt_tokens:
        return Reject(candidate.item, "prompt too long", f"{tokens} tokens", prompt)
    if prompt in seen:
        return Reject(candidate.item, "duplicate prompt", "the same tokens came before", prompt)
    seen.add(prompt)
    return candidate


def _prompt(item: Item, prepare: Prepare, renderer: Renderer) -> Candidate:
    messages = prompt_of(item.messages)
    ids = renderer.prompt(messages, item.tools)
    return _make(item.item, ids, messages, prepare)


def _given(item: Item, prepare: Prepare, renderer: Renderer) -> list[Candidate | Reject]:
    """Rows with the answers they came with; beyond max_row_tokens one is cut and counts as capped. Rows of one
    conversation stand on one side of the split, that of its first: they share their text."""
    rows = renderer.given(item.messages, item.tools)
    first = prompt_id(rows[0].ids[: rows[0].prompt_tokens])
    return [
        _given_row(item, f"{item.item}#{row.messages}" if i else item.item, row, first, prepare)
        for i, row in enumerate(rows)
    ]


def _given_row(item: Item, name: str, rendered: Rendered, first: str, prepare: Prepare) -> Candidate | Reject:
    ids, mask = rendered.ids[: prepare.max_row_tokens], rendered.mask[: prepare.max_row_tokens]
    if not has_supervised_pair(mask):
        return Reject(name, "no supervised pair", f"{sum(mask)} answer tokens within {prepare.max_row_tokens}")
    cut = len(rendered.ids) > len(ids)
    messages = item.messages[: rendered.messages]
    return _make(name, ids[: rendered.prompt_tokens], messages, prepare, ids, mask, cut, first)


def _make(
    item: str,
    prompt_ids: Sequence[int],
    messages: Sequence[Message],
    prepare: Prepare,
    ids: Sequence[int] | None = None,
    mask: Sequence[int] = (),
    cut: bool = False,
    splits_by: str = "",
) -> Candidate:
    prompt = prompt_id(prompt_ids)
    return Candidate(
        item,
        prompt,
        split_of(splits_by or prompt, prepare.seed, prepare.held_out_share),
        np.asarray(prompt_ids, np.int32),
        json.dumps(list(messages), ensure_ascii=False),
        prompt_text(messages),
        None if ids is None else np.asarray(ids, np.int32),
        bytes(mask),
        cut,
    )


def _out_of_distribution(prepare: Prepare, renderer: Renderer, seen: set[str]) -> Iterator[Candidate]:
    for item in general_knowledge()[: prepare.out_of_distribution]:
        candidate = _prompt(item, prepare, renderer)
        seen.add(candidate.prompt_id)
        yield candidate


def _drop_leaks(gathered: list[Gathered], apart: list[Candidate]) -> None:
    """Reject training prompts whose text a held-out or out-of-distribution prompt shares: equal but for case,
    whitespace and punctuation, or `SHARED` of the held-out prompt's word 8-grams."""
    everyone = [c for g in gathered for c in g.candidates]
    kept_apart = {c.prompt_id: c.text for c in [*apart, *(c for c in everyone if c.split == "held_out")]}
    train = {c.prompt_id: c.text for c in everyone if c.split == "train"}
    leaks = {t: held for t, held, share in shared_text(kept_apart, train) if share >= SHARED}
    for of_source in gathered:
        kept = []
        for c in of_source.candidates:
            if c.prompt_id in leaks:
                detail = f"shares its text with {leaks[c.prompt_id]}"
                of_source.rejects.append(Reject(c.item, "leaks a held-out prompt", detail, c.prompt_id))
            else:
                kept.append(c)
        of_source.candidates = kept
