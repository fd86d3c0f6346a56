"""One stored row by itself: lengths, mask, NaN, Inf, zeros, constants, doubled slots. The target is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from stages.capture.findings import Finding, RowLike, dtype_name, few, slots_of
from stages.capture.row_faults import StateCounts

_AGAIN = "extract this row again"
_BLOCK = 16  # tokens in a block of vLLM's prefix cache, the unit in which states are left out


def row_findings(row: RowLike, counts: StateCounts) -> Iterator[Finding]:
    """All that can be said of `row` without another row and without the target; counts: of its states."""
    slots = slots_of(row)
    if not len(row.input_ids):
        yield _finding(row, "no_tokens", "A row without tokens", "one token or more", "0", "drop the row at its source")
        return
    yield from _lengths(row, slots)
    yield from _mask(row)
    yield from _values(row, slots, counts)
    dtypes = dict.fromkeys(dtype_name(slot) for slot in slots)
    if len(dtypes) > 1:
        found = ", ".join(dtypes)
        yield _finding(row, "mixed_dtype", "Slots of one row differ in dtype", "one dtype a set", found, _AGAIN)


def _finding(row: RowLike, kind: str, what: str, expected: str, found: str, do: str, **detail: object) -> Finding:
    return Finding(kind, row.file, row.index, what, expected, found, do, detail=detail)


def _lengths(row: RowLike, slots: tuple[Tensor, ...]) -> Iterator[Finding]:
    tokens, counts = len(row.input_ids), [len(slot) for slot in slots]
    if len(set(counts)) > 1:
        what, found = "Slots of one row differ in length", f"{counts} states a slot"
        yield _finding(row, "slot_lengths", what, f"{tokens} states in each, one a token", found, _AGAIN)
    elif counts and counts[0] < tokens:
        yield _fewer(row, tokens, counts[0])
    elif counts and counts[0] > tokens:
        what = "A row has more states than tokens"
        found = f"{counts[0]} states for {tokens} tokens"
        do = "cut the states behind the last token if they are padding; if they are another request's, extract again"
        yield _finding(row, "more_states", what, "one state a token", found, do)


def _fewer(row: RowLike, tokens: int, states: int) -> Finding:
    missing = tokens - states
    cause = "it may be a stretch that another request had computed"
    if missing == 1:
        cause = "one short: a row cut at the model's length limit loses its last token in some engines"
    elif missing % _BLOCK == 0:
        cause = f"a multiple of {_BLOCK}: a prefix cache leaves out what it did not compute"
    found = f"{states} states for {tokens} tokens; {cause}"
    what, do = "A row has fewer states than tokens", f"switch the engine's prefix cache off and {_AGAIN}"
    return _finding(row, "fewer_states", what, "one state a token", found, do, missing=missing)


def _mask(row: RowLike) -> Iterator[Finding]:
    mask, tokens = row.loss_mask, len(row.input_ids)
    if mask is None:
        return
    do = "rebuild the mask from the tokens; the states stay"
    if len(mask) != tokens:
        what, found = "A loss mask is not as long as its row", f"{len(mask)} for {tokens} tokens"
        yield _finding(row, "mask_length", what, "one value a token", found, do)
    strange = mask[(mask != 0) & (mask != 1)].unique().tolist()
    if strange:
        what = "A loss mask holds other values than 0 and 1"
        yield _finding(row, "mask_values", what, "0 or 1", few(strange), do)
    elif len(mask) and not mask.any():
        what, expected = "A loss mask supervises nothing", "1 on the answer's tokens"
        yield _finding(row, "mask_empty", what, expected, f"{len(mask)} zeros", do)
    elif len(mask) > 1 and bool(mask.all()):
        what = "A loss mask supervises the whole row, prompt and all"
        yield _finding(row, "mask_full", what, "0 on the prompt's tokens", f"{len(mask)} ones", do)


def _values(row: RowLike, slots: tuple[Tensor, ...], counts: StateCounts) -> Iterator[Finding]:
    if counts.nan:
        what, found = "States hold NaN", f"{counts.nan} values: {_places(slots, lambda s: s.isnan().any(-1))}"
        yield _finding(row, "nan", what, "finite values; one NaN ends in every weight", found, _AGAIN)
    if counts.inf:
        what, found = "States hold infinity", f"{counts.inf} values: {_places(slots, lambda s: s.isinf().any(-1))}"
        expected = "finite values; above 65 504 float16 overflows to infinity, and a later cast keeps it"
        yield _finding(row, "inf", what, expected, found, f"capture in bfloat16 or float32 and {_AGAIN}")
    yield from _empty(row, slots, counts)
    if counts.equal_slots and not counts.zero_states:
        same = [i for i, slot in enumerate(slots) if any(slot.equal(other) for other in slots[:i])]
        what, expected = "A slot repeats another", "another point of the target in each slot"
        found = f"{_slots(same)} what an earlier slot holds"
        do = "compare the layer ids that the engine was given: one stands there twice"
        yield _finding(row, "equal_slots", what, expected, found, do, slots=same)


def _empty(row: RowLike, slots: tuple[Tensor, ...], counts: StateCounts) -> Iterator[Finding]:
    states = sum(len(slot) for slot in slots)
    if states and counts.zero_states == states:
        expected, found = "the target's states; zeros are memory that nothing was written to", f"{states} zeros"
        yield _finding(row, "all_zero", "All states of a row are zero", expected, found, _AGAIN)
        return
    if counts.zero_states:
        tail = min(_zeros_at_end(slot) for slot in slots)
        padding = tail and tail * len(slots) == counts.zero_states
        found = f"{counts.zero_states} of {states} states, {_places(slots, lambda s: (s == 0).all(-1))}"
        if padding:
            found = f"the last {tail} tokens: padding stored as states"
        do = "cut ids, mask and states to the row's own length" if padding else _AGAIN
        yield _finding(row, "zero_states", "States of tokens are zero", "no state of zeros", found, do, padding=tail)
    if counts.constant_slots:
        constant = [i for i, s in enumerate(slots) if len(s) > 2 and bool((s[1:] == s[1:2]).all())]
        expected = "a state of its own for each token; a buffer never refilled looks like states and says nothing"
        found = f"{_slots(constant)} one state throughout"
        yield _finding(
            row, "constant", "A slot holds one state for all tokens", expected, found, _AGAIN, slots=constant
        )


def _slots(at: list[int]) -> str:
    return f"slot {at[0]} holds" if len(at) == 1 else f"slots {few(at)} hold"


def _zeros_at_end(slot: Tensor) -> int:
    filled = (slot != 0).any(-1).nonzero()
    return len(slot) - 1 - int(filled[-1]) if len(filled) else len(slot)


def _places(slots: tuple[Tensor, ...], where: Callable[[Tensor], Tensor]) -> str:
    """`slot 1 tokens 4, 5; slot 3 tokens 4`."""
    found = [(i, where(slot).nonzero()[:, 0].tolist()) for i, slot in enumerate(slots)]
    return "; ".join(f"slot {i} tokens {few(tokens, 3)}" for i, tokens in found if tokens)
