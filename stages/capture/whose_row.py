"""States that fit no point of their own tokens: whose are they? Another row's, the next token's, or the target's at all?

A row's last state foretells its next tokens, so that rows of other tokens can be ranked without running them; a few at the
top are run, and only a state that comes out the same names the owner. States that are fewer than their tokens are laid
against the whole row: which are missing is told by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.capture.findings import Finding, LastState, RowLike, slots_of
from stages.capture.margins import REFUSED
from stages.capture.probe import FIRST, apart, high
from stages.capture.row_probe import AGAIN

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

_MOST_TRIED = 8  # rows that go through the target to find an owner
_MOST_KNOWN = 4096  # rows that are remembered
_LEAST_TOKENS = 4  # that have to fit


class KnownRows:
    """Token ids of the rows met, as possible owners of other rows' states."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, int | str, Tensor]] = []
        self._names: set[tuple[str, int | str]] = set()

    def add(self, row: RowLike) -> None:
        """Remember a row's tokens, once."""
        if len(self._rows) < _MOST_KNOWN and len(row.input_ids) and (row.file, row.index) not in self._names:
            self._names.add((row.file, row.index))
            self._rows.append((row.file, row.index, row.input_ids.to(torch.int32)))

    def ranked(self, foretold: Tensor | None, states: int, but: RowLike) -> list[tuple[str, int | str, Tensor]]:
        """Rows by how many of their tokens were foretold [L], then by whether they are as long as the states."""

        def rank(row: tuple[str, int | str, Tensor]) -> tuple[float, bool]:
            shared = min(len(row[2]), states) - 1
            hits = 0.0 if foretold is None else float((foretold[:shared] == row[2][1 : shared + 1]).float().mean())
            return (round(hits, 2), len(row[2]) == states)

        others = [r for r in self._rows if r[:2] != (but.file, but.index) and min(len(r[2]), states) > _LEAST_TOKENS]
        return sorted(others, key=rank, reverse=True)[:_MOST_TRIED]


def whose(
    target: Decoder, row: RowLike, points: Sequence[int], last_state: LastState, known: KnownRows, max_tokens: int
) -> Finding | None:
    """Name whose states a row of right length holds when they are not, or not all, its own tokens'; None if it is not known.

    Rows that begin alike, as chats do, have the same states as far as they do: only a fit at all positions counts.
    """
    held, columns = _compared(target, row, points, last_state)
    slots = torch.stack([slot[:max_tokens].float() for slot in held], 1)
    own = _states(target, row.input_ids[:max_tokens], columns)
    for shift in (1, -1):
        late = slots[1:] if shift > 0 else slots[:-1]
        if _fits(late, own[:-1] if shift > 0 else own[1:]):
            what = "States stand one token too late" if shift > 0 else "States stand one token too early"
            found = f"the state of token p at token p{shift:+d}"
            return _finding(row, "shifted_tokens", what, "the state of token p at token p", found, AGAIN)
    for file, index, ids in known.ranked(_foretold(target, row, last_state, max_tokens), len(slots), row):
        shared = min(len(slots), len(ids))
        if _fits(slots[:shared], _states(target, ids[:shared], columns)):
            what, found = "A row holds another row's states", f"the states of {file} ({index})"
            expected = "the states of its own tokens; an engine that reorders a batch hands back another request's"
            return _finding(row, "wrong_row", what, expected, found, AGAIN, owner=index, owner_file=file)
    return None


def nobodys(row: RowLike) -> Finding:
    """States that fit nothing."""
    what = "States fit no point of the target, for this row or another one known"
    found = f"nothing within {REFUSED:g}"
    do = "check that the target is the one that was captured: weights, revision, tokenizer; if it is, extract again"
    return _finding(row, "no_point", what, "states of the target", found, do)


def missing_states(
    target: Decoder, row: RowLike, points: Sequence[int], last_state: LastState, max_tokens: int
) -> Iterator[Finding]:
    """Where states are missing in a row that has fewer than tokens; nothing where it cannot be told."""
    held, columns = _compared(target, row, points, last_state)
    tokens, states = len(row.input_ids), len(held[0])
    missing = tokens - states
    width = target.config.hidden_size
    if any(s.shape != (states, width) for s in held) or states <= _LEAST_TOKENS or tokens > max_tokens:
        return
    slots = torch.stack([slot.float() for slot in held], 1)
    own = _states(target, row.input_ids, columns)
    at_start = _close(slots, own[:states])
    at_end = _close(slots, own[missing:])
    whole = _all_after(at_start)
    if whole:
        what, found = "A row's last states are missing", f"{states} of {tokens}: the last {missing}"
        do = "raise the engine's length limit by one above the longest row, and extract this row again"
        yield _finding(row, "truncated", what, "one state a token", found, do, missing=missing)
        return
    begin = 0 if _all_after(at_end) else int((~at_start).nonzero()[0])
    if begin == 0 or bool(at_end[begin:].all()):
        where = f"the first {missing}" if begin == 0 else f"tokens {begin} to {begin + missing - 1}"
        what, found = "A row has a hole where a prefix cache left states out", f"{states} of {tokens}: {where} missing"
        do = f"switch the engine's prefix cache off and {AGAIN}"
        yield _finding(row, "prefix_hole", what, "one state a token", found, do, first=begin, missing=missing)


def _compared(
    target: Decoder, row: RowLike, points: Sequence[int], last_state: LastState
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The slots that are compared and the column of each: n or (after the final norm) n+1 for the last state, which is left
    out where it is not known which."""
    if row.last is None or last_state == "unknown":
        return row.aux, tuple(points)
    return slots_of(row), (*points, target.config.layers + (last_state == "after_final_norm"))


def _states(target: Decoder, ids: Tensor, columns: tuple[int, ...]) -> Tensor:
    """The target's own states [L, S, H]; the column behind the last point is the last state after the final norm."""
    n = target.config.layers
    stream = target.packed(ids.long().to(target.device), [len(ids)], [min(c, n) for c in columns])
    normed = torch.nn.functional.rms_norm(stream.last, (stream.last.shape[-1],), target.norm, target.config.eps)
    return torch.stack([normed if c > n else stream.states[c] for c in columns], 1).cpu()


def _close(slots: Tensor, own: Tensor) -> Tensor:
    """Whether all slots of a position are near [L]; position 0 of a row is left out by `_all_after`."""
    return (apart(slots, own) < REFUSED).all(-1)


def _all_after(close: Tensor) -> bool:
    return bool(close[FIRST:].all())


def _fits(slots: Tensor, own: Tensor) -> bool:
    if len(slots) <= _LEAST_TOKENS:
        return False
    far = apart(slots, own)[FIRST:]
    return all(high(far[:, slot]) < REFUSED for slot in range(far.shape[-1]))


def _foretold(target: Decoder, row: RowLike, last_state: LastState, max_tokens: int) -> Tensor | None:
    """The token that each last state makes likeliest [L], i32."""
    if row.last is None or not row.last[:max_tokens].isfinite().all():
        return None
    last = row.last[:max_tokens].to(target.device, target.dtype)
    logits = target.head(last).float() if last_state == "after_final_norm" else target.logits(last)
    return logits.argmax(-1).to(torch.int32).cpu()


def _finding(row: RowLike, kind: str, what: str, expected: str, found: str, do: str, **detail: object) -> Finding:
    return Finding(kind, row.file, row.index, what, expected, found, do, detail=detail)
