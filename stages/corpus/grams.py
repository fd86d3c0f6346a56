"""Word n-grams of prompts as 64-bit hashes, and which training prompts give a prompt away that is kept apart.

Grams are hashed by content alone, so equal texts give equal numbers on every machine. The index is exact: a text that holds
a share s of n grams holds at least one of any n - s·n + 1 of them, so only the rarest of each prompt's grams are looked up,
and what they find is counted in full.
"""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Grams = npt.NDArray[np.uint64]

LEAK_WORDS = 8  # n of the n-grams that tell a leak; 8 words in common are seldom chance
SHARED = 0.8  # share of a kept-apart prompt's n-grams within one training prompt that counts as the same text
_BESIDE = np.uint64(0xD1B54A32D192ED03)  # sets a short text beside a prompt apart from a prompt of the same words
_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # written without spaces: each character counts as a word
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_FACTOR = 0x9E3779B97F4A7C15
_CACHED_WORDS = 1 << 18
_COUNTERS = 1 << 22  # of the sketch that tells rare grams from common ones
_CHUNK = 1 << 22
_hashes: dict[str, int] = {}


def words_of(text: str) -> list[str]:
    """Words alone: case, whitespace and punctuation put aside; each Chinese or Japanese character is a word."""
    return _WORD.findall(text.casefold())


def word_hashes(words: Sequence[str]) -> Grams:
    """A 64-bit number for each word, u64 [words]."""
    if len(_hashes) > _CACHED_WORDS:
        _hashes.clear()
    for word in words:
        if word not in _hashes:
            _hashes[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
    return np.fromiter(map(_hashes.__getitem__, words), np.uint64, len(words))


def grams(hashes: Grams, n: int) -> Grams:
    """The distinct n-grams of a text, ascending, u64; a text of n words or fewer is one gram, one without words none."""
    if not len(hashes):
        return hashes
    size = min(n, len(hashes))
    folded = np.full(len(hashes) - size + 1, size if len(hashes) <= n else n, np.uint64)
    for k in range(size):
        folded = folded * np.uint64(_FACTOR) + hashes[k : len(hashes) - size + 1 + k]
    return np.unique(_mixed(folded))


def grams_of_rows(hashes: Sequence[Grams], n: int) -> list[Grams]:
    """`grams` of many texts at once, equal to them and several times as fast."""
    lengths = np.fromiter(map(len, hashes), np.int64, len(hashes))
    if lengths.sum() < n:
        return [grams(h, n) for h in hashes]
    flat = np.concatenate(hashes)
    folded = np.full(len(flat) - n + 1, n, np.uint64)
    for k in range(n):
        folded = folded * np.uint64(_FACTOR) + flat[k : len(folded) + k]
    rows = np.repeat(np.arange(len(hashes)), lengths)
    whole = rows[: len(folded)] == rows[n - 1 :]  # a gram that begins and ends in one text
    values, of = _mixed(folded[whole]), rows[: len(folded)][whole]
    order = np.lexsort((values, of))
    values, of = values[order], of[order]
    first = np.ones(len(values), bool)
    first[1:] = (values[1:] != values[:-1]) | (of[1:] != of[:-1])
    cuts = np.searchsorted(of[first], np.arange(1, len(hashes)))
    parts = np.split(values[first], cuts)
    return [part if length > n else grams(h, n) for part, length, h in zip(parts, lengths, hashes, strict=True)]


def beside(short: Grams) -> Grams:
    """The one gram of a text of fewer than n words, as it counts in a later turn: there the likes of "go on" are said, so
    that such a text is the same only as one that is never to be trained on."""
    return short ^ _BESIDE


def _mixed(x: Grams) -> Grams:
    """splitmix64's finisher: neighbouring sums become numbers without a pattern."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class KeptApart:
    """Grams of prompts that no training prompt may share its text with, on disk; an owner a prompt, numbered from 0."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._ends = array("q")
        self._flat: Grams | None = None
        self.names: list[str] = []

    def add(self, name: str, of_prompt: Grams) -> None:
        """`name` is for a person: a prompt id, or where the prompt stands."""
        self._file.write(of_prompt.tobytes())
        self._ends.append((self._ends[-1] if self._ends else 0) + len(of_prompt))
        self.names.append(name)

    def add_rare(self, other: KeptApart, wanted: Callable[[int], bool]) -> None:
        """Take in those of `other`, by number, that are wanted, less the grams that several of them share: what many
        conversations say tells nothing away."""
        owners = [owner for owner in range(len(other)) if wanted(owner)]
        grams = np.concatenate([other.of(o) for o in owners]) if owners else np.zeros(0, np.uint64)
        values, counts = np.unique(grams, return_counts=True)
        common = values[counts > 1]
        for owner in owners:
            if len(rare := np.setdiff1d(other.of(owner), common, assume_unique=True)):
                self.add(other.names[owner], rare)

    def of(self, owner: int) -> Grams:
        start = self._ends[owner - 1] if owner else 0
        return self.flat()[start : self._ends[owner]]

    def flat(self) -> Grams:
        """All grams, owner after owner; read from the file as needed, which takes no more of them from then on."""
        if self._flat is None:
            self._file.close()
            some = bool(self._ends and self._ends[-1])
            self._flat = np.memmap(self._path, np.uint64, "r") if some else np.zeros(0, np.uint64)
        return self._flat

    def __len__(self) -> int:
        return len(self._ends)


class LeakIndex:
    """Finds, for batches of training prompts, the kept-apart prompts whose text they share."""

    def __init__(self, apart: KeptApart, share: float = SHARED) -> None:
        self._apart, self._share = apart, share
        keys, owners = [], []
        for owner, rare in _rarest(apart, share):
            keys.append(rare)
            owners.append(np.full(len(rare), owner, np.uint32))
        flat = np.concatenate(keys) if keys else np.zeros(0, np.uint64)
        order = np.argsort(flat, kind="stable")
        self._keys = flat[order]
        self._owners = np.concatenate(owners)[order] if owners else np.zeros(0, np.uint32)

    def shared(self, flat: Grams, offsets: npt.NDArray[np.int64]) -> dict[int, tuple[str, float]]:
        """By row: the name of the kept-apart prompt that it shares most of, and the share; rows below `share` are absent.

        Args:
            flat: grams of the rows, one row after the other, u64 [offsets[-1]].
            offsets: where each row starts, i64 [rows + 1].
        """
        best: dict[int, tuple[str, float]] = {}
        for row, owner in sorted(self._pairs(flat, offsets)):
            held = self._apart.of(owner)
            share = len(np.intersect1d(held, flat[offsets[row] : offsets[row + 1]], assume_unique=True)) / len(held)
            if share >= self._share and share > best.get(row, ("", 0.0))[1]:
                best[row] = (self._apart.names[owner], share)
        return best

    def _pairs(self, flat: Grams, offsets: npt.NDArray[np.int64]) -> set[tuple[int, int]]:
        if not len(self._keys) or not len(flat):
            return set()
        order = np.argsort(flat)  # sorted needles walk the table once
        sought = flat[order]
        left, right = (np.searchsorted(self._keys, sought, side) for side in ("left", "right"))
        hit = np.flatnonzero(right > left)
        rows = np.searchsorted(offsets, order[hit], "right") - 1
        return {
            (int(row), int(owner))
            for row, a, b in zip(rows, left[hit], right[hit], strict=True)
            for owner in self._owners[a:b]
        }


def _rarest(apart: KeptApart, share: float) -> Iterator[tuple[int, Grams]]:
    """Of each prompt, so many of its grams, the rarest first, that sharing the rest alone stays below `share`."""
    counts = np.zeros(_COUNTERS, np.uint32)
    flat = apart.flat()
    for start in range(0, len(flat), _CHUNK):
        slots = (flat[start : start + _CHUNK] % np.uint64(_COUNTERS)).astype(np.int64)
        counts += np.bincount(slots, minlength=_COUNTERS).astype(np.uint32)
    for owner in range(len(apart)):
        own = np.asarray(apart.of(owner))
        wanted = len(own) - math.ceil(share * len(own)) + 1
        rank = np.argsort(counts[(own % np.uint64(_COUNTERS)).astype(np.int64)], kind="stable")
        yield owner, own[rank[: min(wanted, len(own))]]


def joined(parts: Iterable[Grams]) -> tuple[Grams, npt.NDArray[np.int64]]:
    """Grams of rows one after the other, and where each row starts."""
    rows = list(parts)
    flat = np.concatenate(rows) if rows else np.zeros(0, np.uint64)
    return flat, np.cumsum([0, *map(len, rows)], dtype=np.int64)
