"""Adoption: another tool's states for our prepared rows, once it is clear which points they hold (claims.py).

Rows are matched by token ids; the prepared mask wins over the stored one. Nothing here opens a file: a store comes in as
an object that yields rows (stages/bridges), and states go out as capture's own do, so that store, work cache, merge and
gates treat both alike. L tokens, H hidden size, S slots.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stages.capture.claims import SHOWN, Claim, ForeignRow, ForeignStore
from stages.capture.rows import Row
from stages.contracts.adoption import AdoptionRecord
from stages.contracts.errors import DataError, Refusal
from stages.contracts.manifest import CaptureSpec
from stages.contracts.progress import progress


@dataclass
class Matched:
    """Where prepared rows stand in the store, and what was seen on the way; see AdoptionRecord for the counts.

    home: {row_id: (file, place in the file, tokens)}; told: faults with what was there, for a person.
    """

    home: dict[str, tuple[Any, int, int]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    faulty: dict[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)


def match(store: ForeignStore, rows: Sequence[Row], points: int, hidden_size: int) -> Matched:
    """Find every prepared row in the store by its token ids. Reads ids, masks and shapes; no state is touched.

    A file that cannot be read, or whose row lacks a state, is noted with its fault and left aside.

    Args:
        points: auxiliary states that a row must have, beside the last.
    """
    wanted, found = _Wanted(rows), Matched()
    with progress(len(store.files), "adopt: rows of the store", "files") as advance:
        for file in store.files:
            try:
                members = list(store.rows_of(file))
                for place, row in enumerate(members):
                    _demand_slots(store, row, points, hidden_size)
                    _note(found, wanted, file, place, row)
            except DataError as error:
                found.faulty[file.path] = error.what
                found.told[file.path] = f"{error.what} ({error.got})"
            advance()
    return found


def _demand_slots(store: ForeignStore, row: ForeignRow, points: int, hidden_size: int) -> None:
    got = f"{len(row.aux)} auxiliary states and {'a' if row.last is not None else 'no'} last one, {row.aux[0].shape[-1]} wide"
    if row.last is None or len(row.aux) != points or row.aux[0].shape[-1] != hidden_size:
        what = "A sample has no last state" if row.last is None else "A sample has other states than the rest"
        expected = f"{points} auxiliary states and the last one, {hidden_size} wide"
        raise DataError(what, where=str(store.root / row.file), expected=expected, got=got)
    if row.last_state not in (None, "before_final_norm"):
        raise DataError("A sample's last state is after the final norm", where=row.file, got=str(row.last_state))


def _note(found: Matched, wanted: _Wanted, file: Any, place: int, row: ForeignRow) -> None:
    hits = wanted.hits(row)
    if not hits:
        found.counts["unused"] += 1
        found.cut.update(wanted.cut(row))
        return
    fresh = {row_id: tokens for row_id, tokens in hits.items() if row_id not in found.home}
    found.counts["doubled"] += not fresh
    for row_id, tokens in fresh.items():
        found.home[row_id] = (file, place, tokens)
        taken = row.first(tokens)
        found.counts["padded"] += taken.padding > 0
        found.dtypes[str(taken.aux[0].dtype).removeprefix("torch.")] += 1
        if taken.loss_mask is None:
            found.counts["absent_masks"] += 1
        else:
            mask = torch.from_numpy(wanted.row(row_id).loss_mask)
            found.counts["differing_masks"] += not torch.equal(taken.loss_mask, mask)


class _Wanted:
    """Prepared rows by their tokens."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.row_id: row for row in rows}
        self._exact: dict[bytes, list[str]] = {}
        self._short: dict[bytes, list[str]] = {}
        self._base: dict[tuple[bytes, int], list[str]] = {}
        for row in rows:
            ids = torch.from_numpy(row.input_ids)
            self._exact.setdefault(_key(ids), []).append(row.row_id)
            if len(ids) > 1:
                self._short.setdefault(_key(ids[:-1]), []).append(row.row_id)
            self._base.setdefault((_key(ids[: len(ids) - _run(ids)]), int(ids[-1])), []).append(row.row_id)

    def row(self, row_id: str) -> Row:
        return self._rows[row_id]

    def hits(self, row: ForeignRow) -> dict[str, int]:
        """Prepared rows that `row` holds, each with its number of tokens: all of it, or with some of what was taken for
        padding because a row may end in the token that its tool pads with."""
        exact = {row_id: len(row.input_ids) for row_id in self._exact.get(_key(row.input_ids), ())}
        if row.whole is None or not row.padding:
            return exact
        near = self._base.get((_key(row.input_ids), int(row.whole.input_ids[-1])), ())
        lengths = {row_id: len(self._rows[row_id]) for row_id in near}
        return {i: n for i, n in lengths.items() if n <= len(row.whole.input_ids)} | exact

    def cut(self, row: ForeignRow) -> list[str]:
        """Prepared rows that `row` is, but for their last token."""
        return self._short.get(_key(row.input_ids), [])


def _run(ids: Tensor) -> int:
    """Tokens at the end that equal the last one."""
    return int((ids == ids[-1]).flip(0).long().cumprod(0).sum())


def _key(ids: Tensor) -> bytes:
    return hashlib.sha256(ids.long().numpy().tobytes()).digest()  # not int32: an id beyond it would become another one


class Adoption:
    """States of prepared rows, from a store that was matched with them.

    Attributes: spec: what the states are captured with; record: what was adopted; lacking: prepared rows that are not in
    the store.
    """

    def __init__(
        self, store: ForeignStore, rows: Sequence[Row], claim: Claim, spec: CaptureSpec, fingerprint: str
    ) -> None:
        self.spec, self._store = spec, store
        self._matched = match(store, rows, len(spec.points), spec.hidden_size)
        self.lacking = [row for row in rows if row.row_id not in self._matched.home]
        self.record = self._describe(claim, fingerprint, len(rows))

    def _describe(self, claim: Claim, fingerprint: str, rows: int) -> AdoptionRecord:
        kind, found, counts = self._store.kind, self._matched, self._matched.counts
        return AdoptionRecord(
            tool=kind.tool,
            era=kind.era,
            tool_versions=self._store.versions,
            store_fingerprint=fingerprint,
            numbering=kind.numbering or "",
            layer_ids=claim.layer_ids,
            layer_ids_from=claim.layer_ids_from,
            points=self.spec.points,
            last_state_from=claim.last_state_from,
            files=len(self._store.files),
            rows=rows - len(self.lacking),
            extracted_rows=len(self.lacking),
            unused_rows=counts["unused"],
            doubled_rows=counts["doubled"],
            cut_rows=len({row.row_id for row in self.lacking} & found.cut),
            padded_rows=counts["padded"],
            differing_masks=counts["differing_masks"],
            absent_masks=counts["absent_masks"],
            dtypes=dict(sorted(found.dtypes.items())),
            faulty=found.faulty,
            strange_files=len(self._store.strange),
        )

    def words(self) -> str:
        """What was found, in a line for a person."""
        r = self.record
        said = [f"{r.rows} of {r.rows + r.extracted_rows} prepared rows stand in {r.files} files of {r.tool} {r.era}"]
        said += [f"{n} {what}" for n, what in (
            (r.unused_rows, "rows of it are not prepared ones"),
            (r.doubled_rows, "stand there twice"),
            (r.padded_rows, "were padded, which was left out"),
            (r.differing_masks, f"masks differ from the prepared ones, which were taken{self._known()}"),
            (sum(n for d, n in r.dtypes.items() if d != "bfloat16"), "rows are rounded to bfloat16"),
            (r.strange_files, "files are no samples"),
        ) if n]  # fmt: skip
        faults = [f"left aside {file}: {why}" for file, why in islice(self._matched.told.items(), SHOWN)]
        more = len(r.faulty) - len(faults)
        return "\n  ".join(["; ".join(said), *faults, *([f"and {more} files more"] if more > 0 else [])])

    def _known(self) -> str:
        mixed = any(v.startswith("0.4.0") for v in self.record.tool_versions)
        return " (speculators 0.4.0 gave masks to other rows of a batch)" if mixed else ""

    def demand_all(self) -> None:
        """Raises Refusal when the store lacks prepared rows, with their names and the files at fault."""
        if not self.lacking:
            return
        r, faults = self.record, [f"{file}: {why}" for file, why in islice(self._matched.told.items(), SHOWN)]
        names = ", ".join(row.row_id for row in self.lacking[:SHOWN]) + (" …" if len(self.lacking) > SHOWN else "")
        got = [f"{len(self.lacking)} lacking: {names}"]
        if r.cut_rows:
            got.append(
                f"{r.cut_rows} of them stand there without their last token, as rows cut at the model's length do"
            )
        if r.faulty:
            got.append(
                f"{len(r.faulty)} files at fault: " + "; ".join(faults) + (" …" if len(r.faulty) > SHOWN else "")
            )
        raise Refusal(
            "The store lacks states of prepared rows",
            where=str(self._store.root),
            expected=f"all {r.rows + len(self.lacking)} prepared rows, found by their token ids",
            got="; ".join(got),
            do="set capture.adopt_lacking to extract: the target then makes those rows alone; or mend the files named",
        )

    def states(self, rows: Iterable[Row], through_target: Callable[[list[Row]], Iterator[Tensor]]) -> Iterator[Tensor]:
        """Yield bf16 [L, S, H] a row, in order: from the store, or from the target for those that it lacks.

        Raises:
            DataError: a file changed since it was matched, or has other bytes than were written.
        """
        rows = list(rows)
        made = through_target([row for row in rows if row.row_id not in self._matched.home])
        for row in rows:
            at = self._matched.home.get(row.row_id)
            yield next(made) if at is None else self._row(row, *at)

    def _row(self, row: Row, file: Any, place: int, tokens: int) -> Tensor:
        found = next(islice(self._store.rows_of(file, check_bytes=True), place, None)).first(tokens)
        same = found.last is not None and torch.equal(found.input_ids, torch.from_numpy(row.input_ids).long())
        if not same:
            raise DataError(
                "A file of the store changed while it was adopted",
                where=str(self._store.root / file.path),
                expected=f"the tokens of row {row.row_id}",
                got="others",
                do="let nothing write there, then run `dvc repro extract` again",
            )
        assert found.last is not None
        slots = [*found.aux, found.last]
        states_LSH = torch.empty((tokens, len(slots), found.last.shape[-1]), dtype=torch.bfloat16)
        for slot, state_LH in enumerate(slots):
            states_LSH[:, slot] = state_LH
        return states_LSH
