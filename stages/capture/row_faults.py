"""What stored states say of themselves, without the target: NaN, Inf, zeros, constants, copies. Nothing is mended here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.capture.findings import dtype_name
from stages.capture.probe import FIRST, ProbeRow


@dataclass(frozen=True)
class StateCounts:
    """nan, inf: number of such values; zero_states: number of (token, slot) states that are all zero; constant_slots: slots
    that hold one state for all positions after the first; equal_slots: slots that repeat an earlier slot of their row."""

    nan: int
    inf: int
    zero_states: int
    constant_slots: int
    equal_slots: int


@dataclass(frozen=True)
class RowFaults:
    """What one stored row says of itself, without the target. Columns:

    row_id, folder, tokens; dtype: of the states; nan, inf, zero_states, constant_slots, equal_slots: see StateCounts;
    copy_of: the row whose states these are too, though its ids are others, or `none`; ids_equal, mask_equal: whether ids
    and mask are those of the prepared row.
    """

    row_id: str
    folder: str
    tokens: int
    dtype: str
    nan: int
    inf: int
    zero_states: int
    constant_slots: int
    equal_slots: int
    copy_of: str
    ids_equal: bool
    mask_equal: bool


def count_states(slots: Sequence[Tensor], kept: Tensor | None = None) -> StateCounts:
    """Count over the states [L, H] of each slot; kept, bool [L, S]: those that are stored, all when None."""
    there = [torch.ones(len(s), dtype=torch.bool) if kept is None else kept[:, i] for i, s in enumerate(slots)]
    tails = [slot[FIRST:] if kept is None else slot[FIRST:][k[FIRST:]] for slot, k in zip(slots, there, strict=True)]
    return StateCounts(
        nan=sum(int(slot.isnan().sum()) for slot in slots),
        inf=sum(int(slot.isinf().sum()) for slot in slots),
        zero_states=sum(int(((slot == 0).all(-1) & k).sum()) for slot, k in zip(slots, there, strict=True)),
        constant_slots=sum(len(tail) > 1 and bool((tail == tail[:1]).all()) for tail in tails),
        equal_slots=sum(any(torch.equal(slot, other) for other in slots[:i]) for i, slot in enumerate(slots)),
    )


def fingerprint(slots: Sequence[Tensor]) -> str:
    """Equal for equal states, and in practice for no others: of all slots the middle and the last position, which depend on
    every token before them."""
    sha = hashlib.sha256()
    for slot in slots:
        sha.update(f"{dtype_name(slot)} {list(slot.shape)}".encode())
        for position in {len(slot) // 2, len(slot) - 1} if len(slot) else ():
            sha.update(slot[position].contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


_POSITIONS = (16, 64, 256, 1024, 4096)


class Seen:
    """Rows met so far by what they hold."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._parts: dict[bytes, tuple[bytes, str]] = {}

    def before(self, key: str, name: str) -> str | None:
        """The first row with the same content, None when `name` is the first."""
        first = self._first.setdefault(key, name)
        return None if first == name else first

    def part_of_another(self, ids: Tensor, slots: Sequence[Tensor], name: str) -> str | None:
        """The first row that holds the same states at one of a few positions though other tokens lead there."""
        for at in (p for p in _POSITIONS if p < len(ids)):
            key = hashlib.sha256(
                b"".join(s[at].contiguous().view(torch.uint8).numpy().tobytes() for s in slots)
            ).digest()
            tokens = hashlib.sha256(ids[: at + 1].int().numpy().tobytes()).digest()
            known, first = self._parts.setdefault(key, (tokens, name))
            if known != tokens:
                return first
        return None


def row_faults(
    folder: str, rows: Iterable[ProbeRow], prepared: dict[str, tuple[Tensor, Tensor]], seen: Seen | None = None
) -> list[RowFaults]:
    """Look at every stored row of a folder.

    Args:
        prepared: ids and mask [L] by row_id.
        seen: what copies are looked for in: hand the same to every folder of a store.
    """
    records = []
    seen = seen or Seen()
    for row in rows:
        ids, mask = prepared.get(row.row_id, (row.input_ids[:0], row.loss_mask[:0]))
        slots = row.states.unbind(1)
        counts = count_states(slots, row.kept)
        # Zeros and constants are equal to one another for another reason, and a row cut behind its last supervised token
        # may well hold the same states as one that goes on otherwise.
        filled = not counts.zero_states and not counts.constant_slots and (row.kept is None or bool(row.kept.all()))
        copied = seen.before(fingerprint(slots), row.row_id) if filled else None
        copied = copied or (filled and seen.part_of_another(row.input_ids, slots, row.row_id)) or None
        records.append(
            RowFaults(
                row_id=row.row_id,
                folder=folder,
                tokens=len(row.input_ids),
                dtype=dtype_name(row.states),
                **vars(counts),
                copy_of=copied or "none",
                ids_equal=_equal(row.input_ids, ids),
                mask_equal=_equal(row.loss_mask, mask),
            )
        )
    return records


def _equal(stored: Tensor, wanted: Tensor) -> bool:
    return stored.shape == wanted.shape and bool((stored.long() == wanted.long()).all())
