"""Masks that stand beside another row's tokens, because results were sorted as text: "10" before "2".

speculators 0.4.0 and 0.4.0.1 sent a batch of B rows, sorted the results by request id as text, and wrote them out beside the
masks, which were still in list order. File k of a batch (0-based) then holds

    tokens and states of row s(k)          s = 0..B-1 sorted as text: 0, 1, 10, 11, .., 2, 20, ..
    mask of row k, cut to the file's length

Tokens and states agree, so nothing has to be extracted again. The mask of file k's row stands in file s(k); it is whole
there unless that file was shorter. Batches count from the first file of a run; a run that was resumed counts anew, and
what a crash left of a batch is its first files. A batch of 10 rows or fewer sorts the same either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LEAST = 11  # rows in a batch whose numbers sort differently as text
_MOST_CUT = 256  # largest batch that the remains of a crashed run are looked through for
_LEAST_EVIDENCE = 3  # misplaced rows that have to be explained
_LEAST_SHARE = (
    0.2  # of a folder's masks: such an order moves four of five rows or more, and lengths alone show every second
)
_MOST_TRIED = 200_000  # batches laid against the files before the search for a crashed run is given up: a second


@dataclass(frozen=True)
class MaskFacts:
    """number: of the file; tokens: L; mask: as stored, a byte a token; right: recomputed from the tokens, or None where it
    cannot be."""

    number: int
    tokens: int
    mask: bytes
    right: bytes | None

    @property
    def in_place(self) -> bool:
        """Whether the stored mask may be this row's own."""
        return len(self.mask) == self.tokens and self.right in (None, self.mask)


@dataclass(frozen=True)
class MaskOrder:
    """What explains the masks of a folder.

    Attributes:
        batch: B; 0 when the whole folder is smaller than a batch.
        starts: first number of each batch.
        source: number of a file -> number of the file in which its mask stands; -1: of one that a crash left unwritten.
        misplaced: files that hold another row's mask.
    """

    batch: int
    starts: tuple[int, ...]
    source: dict[int, int]
    misplaced: tuple[int, ...]


def text_order(count: int) -> list[int]:
    """0..count-1 sorted as text."""
    return sorted(range(count), key=str)


def text_rank(number: int, count: int) -> int:
    """The place of `number` in `text_order(count)`: where that row's result was written. Counted, not sorted: for numbers of
    every length those that sort before it."""
    text, before = str(number), 0
    for digits in range(1, len(str(count - 1)) + 1):
        least = 10 ** (digits - 1) if digits > 1 else 0
        shorter = digits < len(text)  # a number that begins this one sorts before it
        end = int(text[:digits]) + 1 if shorter else number * 10 ** (digits - len(text))
        before += max(min(end, count) - least, 0)
    return before


def find_order(rows: Sequence[MaskFacts]) -> MaskOrder | None:
    """The batch size under which every stored mask of a folder is that of the row it was sent with; None if there is none,
    or if the masks are in place."""
    facts = {row.number: row for row in rows}
    if sum(not row.in_place for row in rows) < max(_LEAST_EVIDENCE, _LEAST_SHARE * len(rows)):
        return None
    budget = iter(range(_MOST_TRIED))
    first, last = min(facts), max(facts)
    count = last - first + 1
    for cut in (False, True):
        for batch in range(_LEAST, min(count, _MOST_CUT if cut else count) + 1):
            blocks = _blocks(facts, first, last, _Tries(batch, cut, budget))
            order = _order(facts, 0 if batch == count else batch, blocks) if blocks else None
            if order is not None:
                return order
    return None


_Block = tuple[int, int, int]  # first number, files there are, rows in the batch


class _Tries(NamedTuple):
    """Batches of `batch` rows; with `cut`, some of them may have lost their end, and then as many are tried as `budget`
    has numbers."""

    batch: int
    cut: bool
    budget: Iterator[int]

    def from_(self, at: int, last: int) -> Iterator[_Block]:
        size = min(self.batch, last - at + 1)
        yield at, size, size
        if self.cut:
            for there in range(min(size, self.batch - 1), 0, -1):
                if next(self.budget, None) is None:
                    return
                yield at, there, self.batch


def _blocks(facts: dict[int, MaskFacts], first: int, last: int, tries: _Tries) -> list[_Block] | None:
    """Batches that explain every file from `first` to `last`. The longest are tried first, and taken back where they leave
    something unexplained behind them."""
    path: list[_Block] = []
    waiting = [tries.from_(first, last)]
    hopeless: set[int] = set()
    while waiting:
        block = next(waiting[-1], None)
        if block is None:
            waiting.pop()
            if path:
                hopeless.add(sum(path.pop()[:2]))
            continue
        after = block[0] + block[1]
        if after in hopeless or not _explains(facts, block):
            continue
        path.append(block)
        if after > last:
            return path
        waiting.append(tries.from_(after, last))
    return None


def _explains(facts: dict[int, MaskFacts], block: _Block) -> bool:
    """Whether every file of the block whose row's own file is known holds that row's mask."""
    at, there, rows = block
    for k in range(there):
        file = facts.get(at + k)
        place = text_rank(k, rows)
        own = facts.get(at + place) if place < there else None
        if file is None or own is None:
            continue
        if len(file.mask) != min(own.tokens, file.tokens):
            return False
        if own.right is not None and file.mask != own.right[: file.tokens]:
            return False
    return True


def _order(facts: dict[int, MaskFacts], batch: int, blocks: list[_Block]) -> MaskOrder | None:
    source: dict[int, int] = {}
    owner: dict[int, int] = {}  # number of a file -> number of the file with the row whose mask it holds
    for at, there, rows in blocks:
        for k, row in enumerate(text_order(rows)[:there]):
            if at + k in facts:
                source[at + k] = at + row if row < there else -1
        owner |= {at + k: at + text_rank(k, rows) for k in range(there) if at + k in facts}
    wrong = [n for n, row in facts.items() if not row.in_place]
    proven = [n for n in wrong if owner[n] != n and owner[n] in facts]
    if len(proven) < max(_LEAST_EVIDENCE, len(wrong) / 2):
        return None
    misplaced = tuple(sorted(n for n, s in source.items() if s != n))
    return MaskOrder(batch, tuple(at for at, _, _ in blocks), source, misplaced)
