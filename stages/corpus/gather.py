"""From sources to candidates: prompts that fit, each once, on its side of the split, none giving a held-out one away.

Sources are read once, in their order, into a spool on disk; then sift.py decides who stays.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stages.contracts.errors import DataError
from stages.contracts.progress import progress
from stages.corpus.candidates import asked, asked_words, given_rows, ready_row
from stages.corpus.conversations import check_turns
from stages.corpus.grams import LEAK_WORDS, Grams, KeptApart, grams, grams_of_rows, word_hashes
from stages.corpus.items import Item, Reject, RowFault
from stages.corpus.near import NEAR_WORDS, Signatures
from stages.corpus.quality import prompt_words
from stages.corpus.ready import ReadyRows
from stages.corpus.rendering import Renderer
from stages.corpus.shapes import Ready
from stages.corpus.sift import ALIKE, REASONS, Fate, Sift, Table
from stages.corpus.sources import Reading, general_knowledge, read_files
from stages.corpus.split import row_id
from stages.corpus.spool import Candidate, Spool, Tally, candidates_of

if TYPE_CHECKING:
    from stages.contracts.params import Prepare, Source


_TOGETHER = 256  # rows whose n-grams are made at once
# A row, and whether it is a further one of its conversation: near its first by nature, so compared with no other.
_Taken = tuple[Candidate | Reject, bool]


@dataclass
class Gathered:
    """What was read of one source, and what of it stays. Candidates and rejects are read from disk each time."""

    source: Source
    spool: Spool
    origin_digest: str = ""
    rows_read: int = 0
    extra_rows: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    first: int = 0
    fates: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    details: dict[int, str] = field(default_factory=dict)

    @property
    def candidates(self) -> Iterator[Candidate]:
        """The candidates that stay, in the order of reading."""
        for start, batch in self.spool.batches():
            yield from candidates_of(batch, self.fates[start : start + batch.num_rows] == Fate.KEPT)

    @property
    def kept(self) -> int:
        return int((self.fates == Fate.KEPT).sum())

    def rejects(self) -> Iterator[Reject]:
        """What was rejected: of reading in its order, with doubled prompts between; then leaks, near duplicates, weights."""
        read = heapq.merge(self.spool.rejects(), self._fallen(Fate.DUPLICATE), key=lambda r: r[0])
        yield from (reject for _, reject in read)
        for fate in (Fate.LEAK, Fate.NEAR, Fate.WEIGHT):
            yield from (reject for _, reject in self._fallen(fate))

    def _fallen(self, fate: Fate) -> Iterator[tuple[int, Reject]]:
        if not (self.fates == fate).any():
            return
        for start, batch in self.spool.batches(("at", "item", "prompt_id")):
            at, item, prompt = (batch.column(n) for n in ("at", "item", "prompt_id"))
            for i in np.flatnonzero(self.fates[start : start + batch.num_rows] == fate):
                detail = ALIKE.get(fate) or self.details[self.first + start + int(i)]
                yield at[i].as_py(), Reject(item[i].as_py(), REASONS[fate], detail, prompt[i].as_py())


@dataclass
class Corpus:
    """All that was gathered. `near` and `leaks` hold what is left of both among the rows that stay: (prompt id, what it is
    like, how much of it)."""

    gathered: list[Gathered]
    apart: list[Candidate]
    near: list[tuple[str, str, float]] = field(default_factory=list)
    leaks: list[tuple[str, str, float]] = field(default_factory=list)


class _Gathering:
    """One pass over the sources: everything that is kept of an item while the others are read."""

    def __init__(self, prepare: Prepare, renderer: Renderer, ready: ReadyRows, folder: Path) -> None:
        self.prepare, self.renderer, self.ready, self.folder = prepare, renderer, ready, folder
        self.table = Table()
        self.kept_apart = KeptApart(folder / "kept_apart.u64")
        self.signatures = Signatures(folder / "signatures.u32")
        self.names = (folder / "names").open("wb")
        self.apart_ids: set[str] = set()

    def read(self, number: int, source: Source, advance: Any) -> Gathered:
        reading = Reading(source, self.prepare.seed, self.prepare.max_prompt_tokens)
        gathered = Gathered(source, Spool(self.folder / source.name), shapes=reading.shapes)
        waiting: list[_Taken] = []
        for item in reading:
            advance(1, source.name)
            taken = [item] if isinstance(item, Reject) else self._taken(item, source)
            gathered.extra_rows += len(taken) - 1
            waiting += [(one, i > 0) for i, one in enumerate(taken)]
            if len(waiting) >= _TOGETHER:
                self._keep(waiting, number, gathered.spool)
                waiting = []
        self._keep(waiting, number, gathered.spool)
        gathered.origin_digest, gathered.rows_read = reading.origin_digest, reading.rows_read
        gathered.spool.close()
        return gathered

    def _taken(self, item: Item, source: Source) -> list[Candidate | Reject]:
        """The rows of an item, one unless the template takes several for a conversation; or why there is none."""
        try:
            if isinstance(item, Ready):
                rows = [ready_row(item, source, self.prepare, self.ready)]
            else:
                check_turns(item.messages, answered=source.answers == "given")
                self.renderer.check_text(item.messages, item.tools)
                if source.answers == "given":
                    rows = given_rows(item, self.prepare, self.renderer)
                else:
                    rows = [asked(item, self.prepare, self.renderer)]
        except RowFault as fault:
            return [Reject(item.item, fault.reason, fault.detail)]
        return [self._fit(row) for row in rows]

    def _fit(self, row: Candidate | Reject) -> Candidate | Reject:
        if isinstance(row, Candidate):
            n = len(row.prompt_ids)
            if n > self.prepare.max_prompt_tokens:
                return Reject(row.item, "prompt too long", f"{n} tokens", row.prompt_id)
            if row.prompt_id in self.apart_ids:
                return Reject(row.item, REASONS[Fate.DUPLICATE], ALIKE[Fate.DUPLICATE], row.prompt_id)
        return row

    def _keep(self, taken: Sequence[_Taken], source: int, spool: Spool) -> None:
        """Spool what was taken and note what the sifting needs."""
        hashes = [word_hashes(prompt_words(one.turns if isinstance(one, Candidate) else ())) for one, _ in taken]
        leak = grams_of_rows(hashes, LEAK_WORDS)
        near = grams_of_rows(
            [h[:0] if further else h for h, (_, further) in zip(hashes, taken, strict=True)], NEAR_WORDS
        )
        for (one, _), words, close in zip(taken, leak, near, strict=True):
            spool.add(one, words)
            if isinstance(one, Candidate):
                self._note(one, source, words, close)

    def _note(self, one: Candidate, source: int, words: Grams, close: Grams) -> None:
        held = one.split == "held_out"
        whole = one.prompt_id if one.given_ids is None else row_id(one.given_ids, one.given_mask)
        self.table.add(one.prompt_id, whole, source, held)
        self.signatures.add(close, int(one.prompt_id[:8], 16))
        self.names.write(bytes.fromhex(one.prompt_id))
        if held and len(words):
            self.kept_apart.add(one.prompt_id, words)

    def set_apart(self) -> list[Candidate]:
        """The out-of-distribution prompts, and the texts of benchmark prompts: no training prompt may hold them."""
        apart = []
        for item in general_knowledge()[: self.prepare.out_of_distribution]:
            candidate = asked(item, self.prepare, self.renderer)
            self.apart_ids.add(candidate.prompt_id)
            self._set_apart(candidate.prompt_id, prompt_words(candidate.turns))
            apart.append(candidate)
        for path in self.prepare.benchmark_prompts:
            found = 0
            for item in read_files(path):
                if isinstance(item, Item):
                    self._set_apart(f"benchmark prompt {item.item}", asked_words(item, self.ready))
                    found += 1
            if not found:
                raise DataError(
                    "A file of benchmark prompts holds none",
                    where=f"params.yaml: prepare.benchmark_prompts, {path}",
                    expected="rows of any shape that a source may have",
                    do="mend the file, or take it out",
                )
        return apart

    def _set_apart(self, name: str, words: Sequence[str]) -> None:
        of_prompt = grams(word_hashes(words), LEAK_WORDS)
        if len(of_prompt):
            self.kept_apart.add(name, of_prompt)

    def name(self, number: int) -> str:
        """The prompt id of a candidate."""
        with (self.folder / "names").open("rb") as file:
            file.seek(12 * number)
            return file.read(12).hex()


def gather(prepare: Prepare, renderer: Renderer, ready: ReadyRows, folder: Path) -> Corpus:
    """Read all sources in their order, and the prompts that are kept apart.

    Args:
        folder: takes the spool; as large as the sources, and needed until the rows are written.

    Raises:
        DataError: a source is not there or gives nothing, or a mask cannot be derived (rendering.py).
    """
    folder.mkdir(parents=True)
    at_work = _Gathering(prepare, renderer, ready, folder)
    apart = at_work.set_apart()
    with progress(sum(s.limit for s in prepare.sources), "prompts", "read") as advance:
        gathered = [at_work.read(i, source, advance) for i, source in enumerate(prepare.sources)]
    at_work.names.close()
    return _sifted(at_work, gathered, apart)


def _sifted(at_work: _Gathering, gathered: list[Gathered], apart: list[Candidate]) -> Corpus:
    prepare = at_work.prepare
    sift = Sift(at_work.table, [g.spool for g in gathered])
    for i, of_source in enumerate(gathered):
        of_source.first, of_source.fates = sift.of_source(i)
        of_source.details = sift.details
    sift.drop_duplicates()
    sift.drop_leaks(at_work.kept_apart)
    near = sift.near(at_work.signatures, prepare.near_duplicate_similarity)
    if prepare.near_duplicates == "drop":
        sift.drop_near(near, at_work.name)
        near = []
    for of_source in gathered:
        if not of_source.kept:
            tally = Tally(Counter())
            for reject in of_source.rejects():
                tally.take(reject)
            demand_rows(of_source.source.name, 0, tally)
    sift.drop_beyond_weights([s.weight for s in prepare.sources], prepare.seed)
    kept = [n for n in near if sift.fates[n.row] == Fate.KEPT and sift.fates[n.other] == Fate.KEPT]
    return Corpus(
        gathered,
        apart,
        near=[(at_work.name(n.row), at_work.name(n.other), n.similarity) for n in kept],
        leaks=[(at_work.name(row), name, share) for row, name, share in sift.leaks(at_work.kept_apart)],
    )


def demand_rows(source: str, rows: int, rejects: Tally) -> None:
    """Raises DataError when nothing of a source is left: the line would train and measure without its domain."""
    if rows:
        return
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(rejects.reasons.items()))
    one = rejects.first
    first = f"; the first is {one.item}: {one.reason} {one.detail[:80]}".rstrip() if one else ""
    raise DataError(
        f"No row of source {source} was accepted",
        where=f"params.yaml: prepare.sources, {source}",
        expected="at least one row",
        got=f"{rejects.reasons.total()} read: {reasons}{first}" if one else "nothing to read: the source is empty",
        do="mend the source, or take it out of prepare.sources",
    )
