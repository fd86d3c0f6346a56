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
from functools import cache

_LEAST = 11  # rows in a batch whose numbers sort differently as text
_MOST_CUT = 256  # largest batch that the remains of a crashed run are looked through for
_LEAST_EVIDENCE = 3  # misplaced rows that have to be explained


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
        source: number of a file -> number of the file in which its mask stands.
        misplaced: files that hold another row's mask.
    """

    batch: int
    starts: tuple[int, ...]
    source: dict[int, int]
    misplaced: tuple[int, ...]


@cache
def text_order(count: int) -> tuple[int, ...]:
    """0..count-1 sorted as text."""
    return tuple(sorted(range(count), key=str))


@cache
def _place(count: int) -> tuple[int, ...]:
    """The inverse of `text_order`: where row k's result was written."""
    place = [0] * count
    for at, row in enumerate(text_order(count)):
        place[row] = at
    return tuple(place)


def find_order(rows: Sequence[MaskFacts]) -> MaskOrder | None:
    """The batch size under which every stored mask of a folder is that of the row it was sent with; None if there is none,
    or if the masks are in place."""
    facts = {row.number: row for row in rows}
    if sum(not row.in_place for row in rows) < _LEAST_EVIDENCE:
        return None
    first, last = min(facts), max(facts)
    count = last - first + 1
    for cut in (False, True):
        for batch in range(_LEAST, min(count, _MOST_CUT if cut else count) + 1):
            blocks = _blocks(facts, first, last, batch, cut)
            order = _order(facts, 0 if batch == count else batch, blocks) if blocks else None
            if order is not None:
                return order
    return None


_Block = tuple[int, int, int]  # first number, files there are, rows in the batch


def _blocks(facts: dict[int, MaskFacts], first: int, last: int, batch: int, cut: bool) -> list[_Block] | None:
    """Batches that explain every file from `first` to `last`; with `cut`, some of them may have lost their end."""
    blocks: list[_Block] = []
    at = first
    while at <= last:
        size = min(batch, last - at + 1)
        block = next((b for b in _candidates(at, size, batch, cut) if _explains(facts, b)), None)
        if block is None:
            return None
        blocks.append(block)
        at += block[1]
    return blocks


def _candidates(at: int, size: int, batch: int, cut: bool) -> Iterator[_Block]:
    yield at, size, size
    if cut:
        yield from ((at, there, batch) for there in range(min(size, batch - 1), 0, -1))


def _explains(facts: dict[int, MaskFacts], block: _Block) -> bool:
    """Whether every file of the block whose row's own file is known holds that row's mask."""
    at, there, rows = block
    place = _place(rows)
    for k in range(there):
        file = facts.get(at + k)
        own = facts.get(at + place[k]) if place[k] < there else None
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
        source |= {at + k: at + row for k, row in enumerate(text_order(rows)[:there]) if at + k in facts}
        owner |= {at + k: at + place for k, place in enumerate(_place(rows)[:there]) if at + k in facts}
    wrong = [n for n, row in facts.items() if not row.in_place]
    proven = [n for n in wrong if owner[n] != n and owner[n] in facts]
    if len(proven) < max(_LEAST_EVIDENCE, len(wrong) / 2):
        return None
    misplaced = tuple(sorted(n for n, s in source.items() if s != n))
    return MaskOrder(batch, tuple(at for at, _, _ in blocks), source, misplaced)
