"""Which candidates stay: each prompt once, none that gives a kept-apart prompt away, near duplicates and weights by policy.

Decisions go by content, not by place: shuffled sources keep the same rows. What is held a candidate is a few numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from stages.corpus.grams import KeptApart, LeakIndex
from stages.corpus.near import Near, Signatures
from stages.corpus.spool import Spool, grams_of


class Fate(IntEnum):
    """What became of a candidate; the order is that in which rejects are listed."""

    KEPT = 0
    DUPLICATE = 1
    LEAK = 2
    NEAR = 3
    WEIGHT = 4


ALIKE = {  # details that are the same for all
    Fate.DUPLICATE: "the same tokens came before",
    Fate.WEIGHT: "drawn out, so that the sources keep the proportions of their weights",
}
REASONS = {
    Fate.DUPLICATE: "duplicate prompt",
    Fate.LEAK: "leaks a held-out prompt",
    Fate.NEAR: "near duplicate",
    Fate.WEIGHT: "beyond its weight",
}


@dataclass
class Table:
    """A few numbers a candidate, in the order of reading over all sources: 19 bytes each. Prompts and rows go by the first 64
    bits of their names: two of 50 million are equal by chance with probability 1 : 15,000."""

    prompts: array[int] = field(default_factory=lambda: array("Q"))
    rows: array[int] = field(default_factory=lambda: array("Q"))
    sources: array[int] = field(default_factory=lambda: array("H"))
    held_out: array[int] = field(default_factory=lambda: array("B"))

    def add(self, prompts: bytes, rows: npt.NDArray[np.uint64], source: int, held_out: npt.NDArray[np.uint8]) -> None:
        """Take in candidates of a source; `prompts`: 12 bytes of each prompt id, `rows`: u64 of each row's name."""
        names = np.frombuffer(prompts, np.uint8).reshape(-1, 12)[:, :8]
        self.prompts.frombytes(np.ascontiguousarray(names).view(">u8").astype(np.uint64).tobytes())
        self.rows.frombytes(rows.tobytes())
        self.sources.extend([source] * len(held_out))
        self.held_out.frombytes(held_out.tobytes())

    def __len__(self) -> int:
        return len(self.prompts)


class Sift:
    """The decisions over all candidates; `fates` u8 [candidates] and `details` by candidate."""

    def __init__(self, table: Table, spools: Sequence[Spool]) -> None:
        self._spools = spools
        self._prompts = np.frombuffer(table.prompts, np.uint64) if len(table) else np.zeros(0, np.uint64)
        self._rows = np.frombuffer(table.rows, np.uint64) if len(table) else np.zeros(0, np.uint64)
        self._sources = np.frombuffer(table.sources, np.uint16) if len(table) else np.zeros(0, np.uint16)
        self._held = np.frombuffer(table.held_out, np.uint8).astype(bool) if len(table) else np.zeros(0, bool)
        self.fates = np.zeros(len(table), np.uint8)
        self.details: dict[int, str] = {}

    def of_source(self, source: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """The number of a source's first candidate, and the fates of all of its."""
        start, end = np.searchsorted(self._sources, [source, source + 1])
        return int(start), self.fates[start:end]

    def drop_duplicates(self) -> None:
        """Of equal prompts, that of the earliest source stays, in it the row of the lowest digest, of equal rows the first."""
        order = np.lexsort((np.arange(len(self.fates)), self._rows, self._sources, self._prompts))
        again = np.concatenate([[False], self._prompts[order][1:] == self._prompts[order][:-1]])[: len(order)]
        self.fates[order[again]] = Fate.DUPLICATE

    def drop_leaks(self, apart: KeptApart) -> list[tuple[int, str, float]]:
        """Training rows that share text with a prompt of `apart` fall; returns them as `_leaks` gives them."""
        found = self._leaks(apart)
        for number, name, _ in found:
            self._drop(number, Fate.LEAK, f"shares its text with {name}")
        return found

    def _leaks(self, apart: KeptApart) -> list[tuple[int, str, float]]:
        """(candidate, name of the prompt kept apart, share of its n-grams) of training candidates that are still kept."""
        index = LeakIndex(apart)
        found: list[tuple[int, str, float]] = []
        base = 0
        for spool in self._spools:
            for start, batch in spool.batches(("grams",)):
                for row, (name, share) in index.shared(*grams_of(batch)).items():
                    number = base + start + row
                    if self.fates[number] == Fate.KEPT and not self._held[number]:
                        found.append((number, name, share))
            base += spool.candidates
        return found

    def near(self, signatures: Signatures, similarity: float) -> list[Near]:
        """Near duplicates among the candidates that are kept: held-out prompts stay before training prompts, those of
        earlier sources before later ones, and else those of the lower digest."""
        apart = (self.fates != Fate.KEPT).astype(np.uint8)
        order = np.lexsort((np.arange(len(self.fates)), self._prompts, self._sources, ~self._held, apart))
        rank = np.empty(len(order), np.uint64)
        rank[order] = np.arange(len(order), dtype=np.uint64)
        wanted = self.fates == Fate.KEPT
        return signatures.near(rank, similarity, wanted)

    def drop_near(self, near: Sequence[Near], name: Callable[[int], str]) -> None:
        """Near duplicates fall; `name` gives the prompt id of a candidate."""
        for n in near:
            self._drop(n.row, Fate.NEAR, f"{n.similarity:.2f} like {name(n.other)}")

    def drop_beyond_weights(self, weights: Sequence[float | None], seed: int) -> None:
        """Of each source no more rows than its weight allows beside the scarcest one, chosen by a hash of the prompt."""
        kept = [np.flatnonzero((self._sources == s) & (self.fates == Fate.KEPT)) for s in range(len(weights))]
        asked = [w for w in weights if w is not None]
        if not asked or len(asked) < len(weights):
            return
        scale = min(len(k) / w for k, w in zip(kept, asked, strict=True))
        for numbers, weight in zip(kept, asked, strict=True):  # as many as these may fall; no detail is kept for each
            room = round(scale * weight)
            order = np.argsort(_draws(self._prompts[numbers], seed), kind="stable")
            self.fates[numbers[order[room:]]] = Fate.WEIGHT

    def _drop(self, number: int, fate: Fate, detail: str) -> None:
        self.fates[number] = fate
        self.details[number] = detail


def _draws(prompts: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """A number a prompt, drawn anew with each seed."""
    mixed = (prompts ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
