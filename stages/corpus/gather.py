"""From sources to candidates: prompts that fit, each once, on its side of the split, none giving a held-out one away.

Sources are read once, in their order, into a spool on disk; then sift.py decides who stays.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stages.contracts.errors import DataError
from stages.contracts.progress import progress
from stages.corpus.candidates import asked, asked_words
from stages.corpus.grams import LEAK_WORDS, KeptApart, beside, grams, word_hashes
from stages.corpus.items import Item, Reject, RowFault
from stages.corpus.near import Signatures
from stages.corpus.parallel import Processes
from stages.corpus.quality import prompt_words
from stages.corpus.ready import ReadyRows
from stages.corpus.rendering import Renderer
from stages.corpus.sift import ALIKE, REASONS, Fate, Sift, Table
from stages.corpus.sources import Reading, Record, general_knowledge, read_files
from stages.corpus.spool import Candidate, Spool, Tally, candidates_of
from stages.corpus.taking import Taken, Taker, begin, take

if TYPE_CHECKING:
    from stages.contracts.params import Prepare, Source


_TOGETHER = 256  # rows that are tokenised at once
_TOGETHER_BYTES = 4 << 20  # and no more of them than that
_ALONE = 8  # so many times as many rows are taken in before other processes are started
_Task = tuple["Source", list[Record | Item | Reject], int]


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
        for batch, wanted in self.batches():
            yield from candidates_of(batch, wanted)

    def batches(self) -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.bool_]]]:
        """Candidates batch by batch, and which of them stay."""
        for start, batch in self.spool.batches():
            yield batch, self.fates[start : start + batch.num_rows] == Fate.KEPT

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
        self.later, self.later_of = KeptApart(folder / "later.u64"), array("Q")
        self.signatures = Signatures(folder / "signatures.u32")
        self.names = (folder / "names").open("wb")
        self.apart_ids: set[str] = set()

    def read(self, advance: Any) -> list[Gathered]:
        """All sources in their order."""
        prepare = self.prepare
        readings = [Reading(s, prepare.seed, prepare.max_prompt_tokens) for s in prepare.sources]
        gathered = [Gathered(s, Spool(self.folder / s.name)) for s in prepare.sources]
        tasks: deque[int] = deque()

        def told() -> Iterator[_Task]:
            for number, reading in enumerate(readings):
                first = 0
                for rows in _together(reading):
                    tasks.append(number)
                    yield reading.source, rows, first
                    first += len(rows)

        for taken in self._taken(told()):
            number = tasks.popleft()
            readings[number].note(taken.origin, taken.shapes)
            gathered[number].spool.add(taken.candidates, taken.count, taken.rejects)
            gathered[number].extra_rows += taken.extra
            self._note(taken, number)
            advance(taken.read, readings[number].source.name)
        for of_source, reading in zip(gathered, readings, strict=True):
            of_source.origin_digest, of_source.rows_read = reading.origin_digest, reading.rows_read
            of_source.shapes = reading.shapes
            of_source.spool.close()
        return gathered

    def _taken(self, tasks: Iterator[_Task]) -> Iterator[Taken]:
        """Few rows are taken in here; with more of them, processes that do nothing else are worth their start."""
        apart = frozenset(self.apart_ids)
        here = Taker(self.prepare, self.renderer, self.ready, apart)
        for task in itertools.islice(tasks, None if self.prepare.readers == 1 else _ALONE):
            yield here.take(*task)
        if (following := next(tasks, None)) is None:
            return
        rest = itertools.chain([following], tasks)
        with Processes(self.prepare.readers, begin, (self.ready.target, self.prepare, apart)) as processes:
            for task in rest:
                if processes.ready:
                    rest = itertools.chain([task], rest)
                    break
                yield here.take(*task)
            yield from processes.in_order(rest, take)

    def _note(self, taken: Taken, source: int) -> None:
        first = len(self.table)
        self.table.add(taken.prompts, taken.rows, source, taken.held)
        self.signatures.add(taken.signatures)
        self.names.write(taken.prompts)
        for prompt, words in taken.apart:
            self.kept_apart.add(prompt, words)
        for number, prompt, words in taken.later:
            self.later.add(prompt, words)
            self.later_of.append(first + number)

    def set_apart(self) -> list[Candidate]:
        """The out-of-distribution prompts, and the texts of benchmark prompts: no training row may hold them."""
        apart = []
        for item in general_knowledge()[: self.prepare.out_of_distribution]:
            candidate = asked(item, self.prepare, self.renderer)
            self.apart_ids.add(candidate.prompt_id)
            self._set_apart(candidate.prompt_id, prompt_words(candidate.turns))
            apart.append(candidate)
        for path in self.prepare.benchmark_prompts:
            found, unread = 0, Tally(Counter())
            for item in read_files(path):
                found += 1
                if isinstance(fault := self._benchmark_prompt(item), Reject):
                    unread.take(fault)
            if unread.first or not found:
                raise _no_benchmark(path, found, unread)
        return apart

    def _benchmark_prompt(self, item: Item | Reject) -> Reject | None:
        """Set one apart, or say why it cannot be: what is not read is not kept out of training."""
        if isinstance(item, Reject):
            return item
        try:
            words = asked_words(item, self.ready)
        except RowFault as fault:
            return Reject(item.item, fault.reason, fault.detail)
        if not words:
            return Reject(item.item, "no word of a user")
        self._set_apart(f"benchmark prompt {item.item}", words)
        return None

    def _set_apart(self, name: str, words: Sequence[str]) -> None:
        of_prompt = grams(word_hashes(words), LEAK_WORDS)
        if len(of_prompt):
            self.kept_apart.add(name, of_prompt)
        if 0 < len(words) < LEAK_WORDS:
            self.kept_apart.add(name, beside(of_prompt))

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
        gathered = at_work.read(advance)
    at_work.names.close()
    return _sifted(at_work, gathered, apart)


def _no_benchmark(path: str, found: int, unread: Tally) -> DataError:
    where = f"params.yaml: prepare.benchmark_prompts, {path}"
    if unread.first is None:
        return DataError(
            "A file of benchmark prompts holds none",
            where=where,
            expected="rows of any shape that a source may have",
            do="mend the file, or take it out",
        )
    return DataError(
        "Benchmark prompts cannot be read",
        where=where,
        expected="a prompt in every row, in any shape that a source may have: training could hold what is not read",
        got=f"of {found} rows {unread.words}",
        do="mend these rows, or take them out",
    )


def _together(reading: Reading) -> Iterator[list[Record | Item | Reject]]:
    """Rows in lists of _TOGETHER, or fewer where they are long."""
    rows: list[Record | Item | Reject] = []
    held = 0
    for row in reading:
        rows.append(row)
        held += row.bytes_held if isinstance(row, Record) else 0
        if len(rows) == _TOGETHER or held >= _TOGETHER_BYTES:
            yield rows
            rows, held = [], 0
    if rows:
        yield rows


def _sifted(at_work: _Gathering, gathered: list[Gathered], apart: list[Candidate]) -> Corpus:
    prepare = at_work.prepare
    sift = Sift(at_work.table, [g.spool for g in gathered])
    for i, of_source in enumerate(gathered):
        of_source.first, of_source.fates = sift.of_source(i)
        of_source.details = sift.details
    sift.drop_duplicates()
    at_work.kept_apart.add_rare(at_work.later, lambda n: sift.fates[at_work.later_of[n]] == Fate.KEPT)
    leaks = sift.drop_leaks(at_work.kept_apart)
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
        leaks=[(at_work.name(row), name, share) for row, name, share in leaks if sift.fates[row] == Fate.KEPT],
    )


def demand_rows(source: str, rows: int, rejects: Tally) -> None:
    """Raises DataError when nothing of a source is left: the line would train and measure without its domain."""
    if rows:
        return
    raise DataError(
        f"No row of source {source} was accepted",
        where=f"params.yaml: prepare.sources, {source}",
        expected="at least one row",
        got=f"{rejects.reasons.total()} read: {rejects.words}"
        if rejects.first
        else "nothing to read: the source is empty",
        do="mend the source, or take it out of prepare.sources",
    )
