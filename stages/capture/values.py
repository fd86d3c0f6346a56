"""Value checks of stored rows, of any tool's and of ours: what shapes and configs cannot tell.

    rows one by one     lengths, mask, NaN, Inf, zeros, constants (row_values)
    rows together       dtype and shape of the set, doubles, copied states, prepared ids (row_sets), order of masks (mask_repair)
    against the target  points, shift, swap, norm, another row, torn rows (row_probe, whose_row, last_state), on a sample

Nothing is mended or replaced here. States are looked at once and let go; the sample for the target keeps its first tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from stages.capture.findings import Finding, LastState, RowLike, head_of, slots_of
from stages.capture.last_state import norm_findings, read_norm
from stages.capture.mask_order import MaskFacts
from stages.capture.mask_repair import folder_of, mask_facts, mask_findings
from stages.capture.masks import Masks
from stages.capture.probe import MOST_TOKENS
from stages.capture.row_faults import count_states
from stages.capture.row_probe import RowProbe, layer_findings, probe_row, torn_finding, torn_tokens
from stages.capture.row_sets import Prepared, RowSet
from stages.capture.row_values import row_findings
from stages.capture.whose_row import KnownRows, missing_states, nobodys, whose
from stages.contracts.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from stages.targets._decoder import Decoder

PROBE_ROWS = 6
_MOST_SEARCHED = 3  # rows for which an owner is looked for: each costs several runs of the target
_EMPTY = {"no_tokens", "nan", "inf", "all_zero", "zero_states", "constant", "slot_lengths", "more_states"}
_MASKS = {"mask", "mask_length", "mask_empty", "mask_full"}
FileT = TypeVar("FileT")


def read_each(read: Callable[[FileT], RowLike], files: Iterable[FileT]) -> Iterator[RowLike | DataError]:
    """The row of each file, or why it cannot be read, so that one damaged file does not end the look at the others."""
    return read_all(lambda file: (read(file),), files)


def read_all(read: Callable[[FileT], Iterable[RowLike]], files: Iterable[FileT]) -> Iterator[RowLike | DataError]:
    """`read_each` for files that may hold several rows."""
    for file in files:
        try:
            yield from read(file)
        except DataError as error:
            yield error


def check_values(
    rows: Iterable[RowLike | DataError],
    *,
    target: Decoder | None,
    points: Sequence[int] | None,
    last_state: LastState,
    masks_of: Masks | None = None,
    prepared: Prepared | None = None,
    computed: str | None = None,
    probe_rows: int = PROBE_ROWS,
    max_tokens: int = MOST_TOKENS,
    others: Iterable[RowLike | DataError] = (),
    expect: Callable[[list[Tensor]], None] | None = None,
) -> list[Finding]:
    """Everything that stored values tell.

    Args:
        rows: as a store gives them; a DataError in the place of a row is a file that cannot be read (`read_each`).
        target: runs again over a sample, chosen by a hash; None: values are looked at by themselves.
        points: what the auxiliary slots are said to hold, ascending; None: nothing is said, and what they hold is noted.
        last_state: where the last state is said to stand.
        masks_of: the loss mask of token ids; see stages/capture/masks.py.
        prepared: the ids that a row was made from.
        computed: dtype that the states were computed in; None: not known, taken to be the one they are stored in.
        probe_rows: rows that the target runs over.
        max_tokens: of a row that it runs over; states of a prefix do not depend on what follows.
        others: the neighbours of `rows` in the store, where those are a sample: of them tokens and masks are looked at, which
            cost little. One may own the states of one of `rows`, and only whole folders show masks that are out of order.
        expect: told the token ids of the rows that the target will be run over, one by one, before it is: a target that is
            read layer by layer then reads each layer once (stages.targets.expect_rows).

    Returns:
        Findings, faults and notes, rows in the order in which they came; none but notes when all is well.
    """
    found: list[Finding] = []
    together, known, masks = RowSet(prepared), KnownRows(), _Masks(masks_of)
    sample = _Sample(probe_rows, max_tokens)
    for row in rows:
        if isinstance(row, DataError):
            found.append(_unreadable(row))
            continue
        counts = count_states(slots_of(row))
        said = [*row_findings(row, counts), *together.add(row, counts)]
        known.add(row)
        masks.add(row)
        if len(row.input_ids) and not _EMPTY & {f.kind for f in said}:
            sample.offer(row, any(f.kind == "fewer_states" for f in said))
        found += said
    unread = {f.file for f in found if f.kind == "unreadable"}
    for row in others:
        if isinstance(row, DataError):
            found += [] if row.where in unread else [_unreadable(row)]
        else:
            known.add(row)
            masks.add(row)
    found = masks.told(found)
    found += together.unlike()
    if target is not None:
        against = _AgainstTarget(target, points, last_state, computed, max_tokens, known, expect)
        found = against.told(found, sample)
    return found


def _unreadable(error: DataError) -> Finding:
    return Finding("unreadable", error.where, None, error.what, error.expected, error.got, error.do)


class _Sample:
    """Rows to run the target over: the first few by a hash of their name, and the first few that lack states."""

    def __init__(self, most: int, max_tokens: int) -> None:
        self._most, self._max_tokens = most, max_tokens
        self._ranked: list[tuple[str, RowLike]] = []
        self.short: list[RowLike] = []

    def offer(self, row: RowLike, lacks_states: bool) -> None:
        if lacks_states:
            if len(self.short) < _MOST_SEARCHED:
                self.short.append(row)
            return
        name = hashlib.sha256(f"probe {row.file} {row.index}".encode()).hexdigest()
        if len(self._ranked) < self._most or name < self._ranked[-1][0]:
            kept = sorted([*self._ranked, (name, head_of(row, self._max_tokens))], key=lambda r: r[0])
            self._ranked = kept[: self._most]

    @property
    def rows(self) -> list[RowLike]:
        return [row for _, row in self._ranked]


class _Masks:
    """Masks of every folder, judged together once all are known."""

    def __init__(self, masks_of: Masks | None) -> None:
        self._masks_of = masks_of
        self._facts: dict[str, dict[int, MaskFacts]] = {}
        self._files: dict[str, dict[int, str]] = {}

    def add(self, row: RowLike) -> None:
        facts = mask_facts(row, self._masks_of)
        if facts is not None and facts.tokens:
            folder = folder_of(row.file)
            self._facts.setdefault(folder, {})[facts.number] = facts
            self._files.setdefault(folder, {})[facts.number] = row.file

    def told(self, found: list[Finding]) -> list[Finding]:
        """`found` with what the masks show; what a permutation explains is not said again row by row."""
        known = self._facts.items()
        said = [f for folder, facts in known for f in mask_findings(self._files[folder], list(facts.values()))]
        explained: set[str] = set()
        for finding in said:
            if finding.kind == "mask_order":
                misplaced: Sequence[int] = finding.detail["misplaced"]  # type: ignore[assignment]
                explained |= {self._files[finding.file][number] for number in misplaced}
        return [f for f in found if not (f.kind in _MASKS and f.file in explained)] + said


@dataclass
class _AgainstTarget:
    target: Decoder
    points: Sequence[int] | None
    last_state: LastState
    computed: str | None
    max_tokens: int
    known: KnownRows
    expect: Callable[[list[Tensor]], None] | None

    def told(self, found: list[Finding], sample: _Sample) -> list[Finding]:
        """`found` with what the target shows."""
        strange = [f for row in sample.rows if (f := self._strange_ids(row))]
        known = [row for row in sample.rows if not self._strange_ids(row)]
        if self.expect and known:
            self.expect([row.input_ids[: self.max_tokens] for row in known])
        asked = (self.points, self.last_state, self.computed, self.max_tokens)
        probes = [p for row in known if (p := probe_row(self.target, row, *asked))]
        good = [p for p in probes if p.near and not torn_tokens(p)]
        more = [f for probe in good for f in layer_findings(probe)]
        lasts = [p.row for p in good if p.nearest[-1] >= p.layers]
        readings = [r for row in lasts if (r := read_norm(self.target, row, self.max_tokens))]
        more += norm_findings(readings, self.last_state)
        points = self._points(good)
        more += self._odd([p for p in probes if p not in good], points)
        return [
            *self._missing(found, sample.short, points),
            *strange,
            *more,
            *self._notes(good, bool(probes or strange)),
        ]

    def _points(self, good: list[RowProbe]) -> Sequence[int] | None:
        """What the auxiliary slots are said to hold, or else what most rows hold."""
        held = Counter(p.aux for p in good if max(p.aux, default=0) <= p.layers)
        return self.points if self.points is not None or not held else held.most_common(1)[0][0]

    def _strange_ids(self, row: RowLike) -> Finding | None:
        ids, size = row.input_ids, self.target.config.vocab_size
        if int(ids.min()) >= 0 and int(ids.max()) < size:
            return None
        what, found = "Token ids lie outside the target's vocabulary", f"{int(ids.min())} to {int(ids.max())}"
        do = "name the target that was captured; this one has another tokenizer"
        return Finding("foreign_ids", row.file, row.index, what, f"0 to {size - 1}", found, do)

    def _odd(self, odd: list[RowProbe], points: Sequence[int] | None) -> Iterator[Finding]:
        """Rows that hold other states than their own: another row's, in part another's, or nobody's."""
        for place, probe in enumerate(odd):
            known = self.known if place < _MOST_SEARCHED else KnownRows()
            owner = whose(self.target, probe.row, points, self.last_state, known, self.max_tokens) if points else None
            tokens = torn_tokens(probe)
            yield owner or (torn_finding(probe, tokens) if tokens else nobodys(probe.row))

    def _missing(self, found: list[Finding], short: list[RowLike], points: Sequence[int] | None) -> list[Finding]:
        """Rows with fewer states than tokens: where they are missing in place of how many."""
        told: dict[str, Finding] = {}
        for row in short:
            if points is not None and len(points) == len(row.aux) and not self._strange_ids(row):
                said = missing_states(self.target, row, points, self.last_state, self.max_tokens)
                told |= {f.file: f for f in said}
        return [told.get(f.file, f) if f.kind == "fewer_states" else f for f in found]

    def _notes(self, good: list[RowProbe], compared: bool) -> Iterator[Finding]:
        if not compared:
            what, expected = "No row could be compared with the target", "a row of two tokens with a state a token"
            yield Finding(
                "unprobed", "", None, what, expected, "none among those looked at", "look at more rows", note=True
            )
            return
        right = [p for p in good if all(c in (-1, n) for c, n in zip(p.claimed, p.nearest, strict=True))]
        held = sorted({p.aux for p in good if max(p.aux, default=0) <= p.layers})
        if self.points is None and len(held) == 1:
            what, points = "The slots hold these points of the target", list(held[0])
            do = "name them when the store is adopted"
            detail = {"points": points}
            yield Finding(
                "points", "", None, what, "they are not written down", str(points), do, note=True, detail=detail
            )
        elif self.points is None and held:
            for probe in good:
                what, expected = "Rows of one set hold other points", "one meaning a slot throughout"
                do, shown = "keep rows of one capture in one set", str(list(probe.aux))
                yield Finding("mixed_points", probe.row.file, probe.row.index, what, expected, shown, do)
        if right:
            far = max(p.distance(slot) for p in right for slot in range(len(p.nearest)))
            other = min(p.next_best for p in right)
            what = "Slots hold what is said of them" if self.points is not None else "Slots are the target's own states"
            shown = f"{len(right)} rows run again, distance {far:.4f} at most, {other:.4f} to any other point"
            detail = {"rows": len(right), "distance": far, "next_best": other}
            yield Finding("probed", "", None, what, "", shown, "", note=True, detail=detail)
