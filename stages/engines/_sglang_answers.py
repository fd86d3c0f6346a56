"""What a server reports of an answer, in this project's terms.

With an answer's last event it counts verifications, and in a histogram the drafted tokens each accepted. Two things differ from
our convention: the histogram has no order, which the lengths of the events give back, and its last verification may have
accepted tokens behind the answer's end, which are no part of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stages.contracts.errors import EngineError

_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # names change between versions


@dataclass(frozen=True)
class Mark:
    """One event of the stream: answer tokens so far; with the last event, verifications, and those by accepted drafted tokens."""

    tokens: int
    verifications: int
    histogram: tuple[int, ...]


def mark_of(meta: Mapping[str, Any]) -> Mark:
    """The counts in an event's `meta_info`; before the first verification there is no histogram."""
    histogram = next((meta[name] for name in _HISTOGRAM if meta.get(name)), ())
    return Mark(int(meta.get("completion_tokens") or 0), int(meta.get("spec_verify_ct") or 0), tuple(histogram))


def accepted_counts(marks: Sequence[Mark], prompt_id: str) -> tuple[int, ...]:
    """Of every verification of an answer, in turn, the drafted tokens that it kept in the answer.

    An event comes with each verification, and its tokens are those accepted and one more. Where events came together the order
    is lost, and the counts are told in ascending order. An answer of n tokens has n-1 behind the first, which comes from the
    prompt's pass; what the server accepted beyond them stood behind the end of turn or the limit.

    Raises:
        EngineError: the server's own counts contradict each other.
    """
    last = marks[-1] if marks else Mark(0, 0, ())
    counted = Counter({kept: times for kept, times in enumerate(last.histogram) if times})
    if not counted and last.tokens <= 1 and not last.verifications:
        return ()
    *earlier, kept = _in_order(marks, counted) or [*sorted(counted.elements()), 0][: max(1, counted.total())]
    taken = last.tokens - 1 - sum(earlier) - len(earlier)  # what the last verification put into the answer
    if counted.total() != last.verifications or not 1 <= taken <= kept + 1:
        raise EngineError(
            "The server's counts of an answer contradict each other",
            where=f"prompt {prompt_id}",
            expected="as many verifications in the histogram as counted, and each answer token emitted by one of them",
            got=f"{last.tokens} tokens, {last.verifications} verifications, histogram {list(last.histogram)}",
            do="serve one draft length: with adaptive drafting or trees SGLang's counts have another meaning",
        )
    return (*earlier, min(kept, taken))


def _in_order(marks: Sequence[Mark], counted: Counter[int]) -> list[int]:
    """The histogram's entries in the order of the events; empty when the events do not tell it."""
    brought = [after.tokens - before.tokens for before, after in pairwise(marks) if after.tokens > before.tokens]
    earlier = [tokens - 1 for tokens in brought[:-1]]
    rest = list((counted - Counter(earlier)).elements())
    if len(brought) != counted.total() or marks[0].tokens != 1 or len(rest) != 1:
        return []
    return [*earlier, *rest]


def rows_of(hidden: Sequence[Any]) -> tuple[list[list[float]], list[list[float]]]:
    """States of the prompt's tokens and of the decoded ones, from `meta_info.hidden_states`: a list of rows for each chunk of the
    prompt, then a row for each token."""
    prompt: list[list[float]] = []
    decoded: list[list[float]] = []
    for entry in hidden:
        if entry and isinstance(entry[0], list):
            prompt += entry
        else:
            decoded.append(entry)
    return prompt, decoded
