"""Near duplicates: prompts whose sets of word 5-grams are nearly equal, found by MinHash (datasketch) and sorted bands.

Signatures go to a file, not to memory; the estimate of a Jaccard similarity of 0.8 has a standard error of 0.05.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from datasketch import MinHash

from stages.corpus.grams import Grams

NEAR_WORDS = 5
_PERMUTATIONS, _BANDS = 64, 16  # bands of 4 values: of pairs at 0.8 all but 2 in 10,000 meet in a band
_WIDTH = _PERMUTATIONS // _BANDS
_COMPARED = 1 << 16
_SCHEME = "affine32"

Signature = npt.NDArray[np.uint32]
# pairs (before, after) by number, and how alike they are: 12 bytes each; a share of 64 values is exact as float32
_Edges = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Near:
    """`row` is nearly `other`, both by their number; `other` comes first in rank and stays."""

    row: int
    other: int
    similarity: float


class Signatures:
    """MinHash signatures of prompts, in the order in which they are added, u32 [prompts, 64] in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._count = path, path.open("wb"), 0

    def add(self, sketched: Signature) -> None:
        """Take in the signatures of prompts, u32 [prompts, 64]."""
        self._file.write(np.ascontiguousarray(sketched, np.uint32).tobytes())
        self._count += len(sketched)

    def __len__(self) -> int:
        return self._count

    def near(
        self, rank: npt.NDArray[np.uint64], similarity: float, wanted: npt.NDArray[np.bool_] | None = None
    ) -> list[Near]:
        """Prompts that are nearly another of a lower rank which stays, by number.

        Args:
            rank: u64 [prompts], distinct; the lowest of a group of near duplicates stays.
            similarity: Jaccard, 0..1.
            wanted: the prompts to compare, bool [prompts]; all unless given.
        """
        self._file.close()
        if not self._count:
            return []
        table = np.memmap(self._path, np.uint32, "r", shape=(self._count, _PERMUTATIONS))
        found: list[_Edges] = []
        for band in range(_BANDS):
            before, after = _neighbours(table, rank, band)
            if wanted is not None:
                both = wanted[before] & wanted[after]
                before, after = before[both], after[both]
            found += _alike(table, before, after, similarity)
        return _greedy(found, rank)


def sketched(prompts: Sequence[Grams], otherwise: Sequence[int]) -> Signature:
    """The signatures of many prompts, u32 [prompts, 64]: what datasketch's `MinHash.update_batch` gives of each, by its own
    permutations, computed for all of them at once.

    Args:
        prompts: their grams.
        otherwise: a number for each, which stands for a prompt without words, so that it is like no other.
    """
    if not prompts:
        return np.zeros((0, _PERMUTATIONS), np.uint32)
    parts = [p if len(p) else np.asarray([o], np.uint64) for p, o in zip(prompts, otherwise, strict=True)]
    starts = np.cumsum([0, *map(len, parts[:-1])])
    hashes = _finished((np.concatenate(parts) & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    factors, addends = _permutations()
    table = np.empty((len(parts), _PERMUTATIONS), np.uint32)
    for i, (a, b) in enumerate(zip(factors, addends, strict=True)):  # a permutation at a time stays within the cache
        table[:, i] = np.minimum.reduceat(hashes * a + b, starts)
    return table


@lru_cache(maxsize=1)
def _permutations() -> npt.NDArray[np.uint32]:
    return np.asarray(MinHash(_PERMUTATIONS, seed=1, scheme=_SCHEME).permutations, np.uint32)


def _finished(h: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's 32-bit finisher, which datasketch puts before its affine permutations."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _neighbours(
    table: Signature, rank: npt.NDArray[np.uint64], band: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pairs (before, after) that agree in a band: each prompt with the first of its group and with its predecessor."""
    part = np.ascontiguousarray(table[:, band * _WIDTH : (band + 1) * _WIDTH]).astype(np.uint64)
    keys = part[:, 0]
    for k in range(1, _WIDTH):
        keys = keys * np.uint64(0x9E3779B97F4A7C15) + part[:, k]
    order = np.lexsort((rank, keys))
    new = np.concatenate([[True], keys[order][1:] != keys[order][:-1]])
    starts = np.flatnonzero(new)
    leaders = order[np.repeat(starts, np.diff(np.append(starts, len(order))))]
    followers = np.flatnonzero(~new)
    before = np.concatenate([leaders[followers], order[followers - 1]])
    return before, np.concatenate([order[followers], order[followers]])


def _alike(
    table: Signature, before: npt.NDArray[np.int64], after: npt.NDArray[np.int64], similarity: float
) -> Iterator[_Edges]:
    for start in range(0, len(before), _COMPARED):
        a, b = before[start : start + _COMPARED], after[start : start + _COMPARED]
        alike = (table[a] == table[b]).mean(1)
        near = alike >= similarity
        if near.any():
            yield a[near].astype(np.uint32), b[near].astype(np.uint32), alike[near].astype(np.float32)


def _greedy(found: Sequence[_Edges], rank: npt.NDArray[np.uint64]) -> list[Near]:
    """In the order of their rank, prompts fall that are near to one that has not fallen."""
    if not found:
        return []
    first, second, alike = (np.concatenate(part) for part in zip(*found, strict=True))
    order = np.lexsort((rank[first], rank[second]))
    first, second, alike = first[order], second[order], alike[order]
    new = np.ones(len(first), bool)  # a pair meets in many bands
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    fallen: dict[int, Near] = {}
    for a, b, share in zip(first[new].tolist(), second[new].tolist(), alike[new].tolist(), strict=True):
        if a not in fallen and b not in fallen:
            fallen[b] = Near(b, a, share)
    return [fallen[row] for row in sorted(fallen)]
