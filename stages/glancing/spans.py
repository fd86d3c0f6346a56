"""Row numbers as spans, half-open: [[0, 5], [7, 8]] is 0..4 and 7."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Span = tuple[int, int]


def spans_of(numbers: Iterable[int]) -> list[Span]:
    """Spans that hold exactly `numbers`, ascending."""
    found: list[Span] = []
    for n in sorted(set(numbers)):
        if found and found[-1][1] == n:
            found[-1] = (found[-1][0], n + 1)
        else:
            found.append((n, n + 1))
    return found


def size_of(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


def union(spans: Iterable[Span]) -> list[Span]:
    """The same rows, every one once."""
    found: list[Span] = []
    for start, end in sorted(s for s in spans if s[0] < s[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def between(spans: Iterable[Span]) -> list[Span]:
    """The gaps between spans; what lies before the first and after the last is none."""
    joined = union(spans)
    return [(a[1], b[0]) for a, b in pairwise(joined)]


def overlaps(named: Sequence[tuple[str, Span]]) -> list[tuple[str, str, Span]]:
    """Pairs of names whose spans share rows, with the rows shared. Linear in pairs found."""
    found: list[tuple[str, str, Span]] = []
    live: list[tuple[str, Span]] = []
    for name, span in sorted(named, key=lambda x: (x[1], x[0])):
        live = [(n, s) for n, s in live if s[1] > span[0]]
        found += [(n, name, (span[0], min(s[1], span[1]))) for n, s in live if span[0] < span[1]]
        live.append((name, span))
    return found


def in_words(spans: Sequence[Span], most: int = 6) -> str:
    """`3, 7–9, 12 … (5 more)`: both ends are rows."""
    shown = [str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in spans[:most]]
    return ", ".join(shown) + (f" … ({len(spans) - most} more)" if len(spans) > most else "")
