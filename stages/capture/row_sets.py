"""Stored rows beside one another: one shape and dtype a set, no row twice, no states twice, the ids that were prepared."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.capture.findings import Finding, RowLike, dtype_name, slots_of
from stages.capture.row_faults import Seen, StateCounts, fingerprint

Prepared = Callable[[RowLike], "Tensor | None"]


@dataclass(frozen=True)
class _Look:
    """The little that is kept of a row."""

    file: str
    index: int | str
    shape: tuple[int, int]  # slots, width
    dtype: str


class RowSet:
    """Takes rows one by one and keeps a few bytes of each."""

    def __init__(self, prepared: Prepared | None = None) -> None:
        """prepared: the ids [L] that a row was made from; None for a row that nobody prepared."""
        self._prepared = prepared
        self._looks: list[_Look] = []
        self._ids, self._states = Seen(), Seen()

    def add(self, row: RowLike, counts: StateCounts) -> Iterator[Finding]:
        """What `row` shows beside those before it and beside the ids it was prepared from."""
        slots = slots_of(row)
        if not len(row.input_ids):
            return
        widths = [slot.shape[-1] for slot in slots]
        dtype = "/".join(dict.fromkeys(dtype_name(slot) for slot in slots))
        self._looks.append(_Look(row.file, row.index, (len(slots), max(widths, default=0)), dtype))
        yield from self._copies(row, slots, counts)
        if self._prepared:
            yield from _against(row, self._prepared(row))

    def _copies(self, row: RowLike, slots: tuple[Tensor, ...], counts: StateCounts) -> Iterator[Finding]:
        name = f"{row.file} ({row.index})"
        ids = hashlib.sha256(row.input_ids.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()
        twin = self._ids.before(ids, name)
        if twin is not None:
            what, expected = "A row is stored twice", "every row once; a doubled one weighs double"
            do = "drop one of the two; a run resumed at the wrong number leaves such rows"
            yield Finding("duplicate", row.file, row.index, what, expected, f"the tokens of {twin}", do)
        if counts.zero_states or counts.constant_slots or not slots:
            return
        owner = self._states.before(fingerprint(slots), name)
        if owner is not None and twin is None:
            what = "Two rows of other tokens have the same states"
            expected = "states of this row's tokens: they depend on every token before them"
            do = "extract both again; one of them has another request's states"
            yield Finding("copied_states", row.file, row.index, what, expected, f"the states of {owner}", do)

    def unlike(self) -> Iterator[Finding]:
        """Rows whose dtype or shape is not that of most. Nothing is converted: which of the two is right is not known here."""
        if not self._looks:
            return
        dtype = Counter(look.dtype for look in self._looks).most_common(1)[0][0]
        shape = Counter(look.shape for look in self._looks).most_common(1)[0][0]
        for look in self._looks:
            if look.dtype != dtype:
                what, expected = "A row is stored in another dtype than the set", f"{dtype}, as in most rows"
                do = "refused, not converted: a mixed set breaks training at a random late step; extract this row again"
                yield Finding("dtype", look.file, look.index, what, expected, look.dtype, do)
            if look.shape != shape:
                what = "A row has another shape than the set: an older schema, or another target"
                expected, found = (f"{slots} states of {width} values a token" for slots, width in (shape, look.shape))
                do = "extract this row again, or keep sets of two schemas in two folders"
                yield Finding("shape", look.file, look.index, what, expected, found, do)


def _against(row: RowLike, prepared: Tensor | None) -> Iterator[Finding]:
    """Stored ids against those that were prepared."""
    do = "extract this row again, from the rows that stand prepared now"
    if prepared is None:
        what = "A stored row was never prepared"
        yield Finding("unprepared", row.file, row.index, what, "a prepared row of this number", "none", do)
        return
    stored, wanted = row.input_ids.long(), prepared.long()
    if stored.equal(wanted):
        return
    shared = min(len(stored), len(wanted))
    differ = (stored[:shared] != wanted[:shared]).nonzero()
    if len(differ):
        what, expected = (
            "Stored token ids are not the prepared ones",
            f"id {int(wanted[differ[0]])} at token {int(differ[0])}",
        )
        found = f"id {int(stored[differ[0]])}; {len(differ)} of {shared} differ"
        yield Finding("ids", row.file, row.index, what, expected, found, do)
    elif len(stored) < len(wanted):
        lost = len(wanted) - len(stored)
        what = f"A row is cut: its last {'token is' if lost == 1 else f'{lost} tokens are'} missing"
        found = f"{len(stored)}; an engine keeps one place of its length limit for the token it generates"
        do = "raise the engine's length limit by one above the longest row, and extract this row again"
        detail = {"missing": lost}
        yield Finding("truncated", row.file, row.index, what, f"{len(wanted)} tokens", found, do, detail=detail)
    else:
        what, found = "A row is longer than prepared", f"{len(stored)} tokens"
        yield Finding("padded", row.file, row.index, what, f"{len(wanted)} tokens", found, "cut it to its own length")
