"""What the written rows are like: counts that gate-extraction judges, taken while the rows are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stages.contracts.manifest import PreparedManifest
from stages.contracts.quality import (
    LENGTH_BINS,
    TOKEN_BINS,
    DomainQuality,
    PreparedQuality,
    SharedText,
    SourceShare,
    digest_of_rows,
)
from stages.corpus.gather import Corpus
from stages.corpus.rows import Row

_NAMED = 20  # rows that a list names
Likeness = Sequence[tuple[str, str, float]]  # prompt id, what it is like, how much


@dataclass
class _Domain:
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    capped: int = 0
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(LENGTH_BINS, np.int64))
    bins: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(TOKEN_BINS, np.int64))


class Measures:
    """Takes rows one by one."""

    def __init__(self, corpus: Corpus) -> None:
        self._near, self._leaks = corpus.near, corpus.leaks
        alike = {p for pair in corpus.near for p in pair[:2]} | {p for p, _, _ in corpus.leaks}
        self._rows: dict[str, str] = dict.fromkeys(alike, "")
        self._domains: dict[str, _Domain] = {}

    def take(self, row: Row) -> None:
        of = self._domains.setdefault(row.domain, _Domain())
        supervised = row.input_ids[row.loss_mask == 1]
        of.rows += 1
        of.tokens += len(row.input_ids)
        of.supervised += len(supervised)
        of.capped += row.finish == "capped"
        of.lengths[min(len(row.input_ids).bit_length() - 1, LENGTH_BINS - 1)] += 1
        of.bins += np.bincount(_bins(supervised), minlength=TOKEN_BINS)
        if row.prompt_id in self._rows:
            self._rows[row.prompt_id] = row.row_id

    def done(self, manifest: PreparedManifest, weights: Mapping[str, float | None]) -> PreparedQuality:
        """The figures of all rows taken. `weights` are those of the sources, by name; a source not named has none."""
        near, leaks = self._written(self._near), self._written(self._leaks)
        return PreparedQuality(
            rows_digest=digest_of_rows(manifest),
            tokenizer_digest=manifest.target.tokenizer_digest,
            domains=tuple(
                DomainQuality(
                    domain=name,
                    rows=d.rows,
                    tokens=d.tokens,
                    supervised_tokens=d.supervised,
                    capped=d.capped,
                    lengths=tuple(d.lengths.tolist()),
                    token_bins=tuple(d.bins.tolist()),
                )
                for name, d in sorted(self._domains.items())
            ),
            sources=tuple(
                SourceShare(
                    source=s.name, rows=s.rows, supervised_tokens=s.supervised_tokens, weight=weights.get(s.name)
                )
                for s in manifest.sources
            ),
            near_duplicates=len(near),
            nearest=near[:_NAMED],
            leaks=len(leaks),
            leaking=leaks[:_NAMED],
        )

    def _written(self, alike: Likeness) -> tuple[SharedText, ...]:
        """Those of which the rows were written, the most alike first; a prompt that became a row is named by it."""
        found = [
            SharedText(row_id=self._rows[prompt], other=self._rows.get(other, other), share=round(share, 4))
            for prompt, other, share in alike
            if self._rows[prompt] and self._rows.get(other, other)
        ]
        return tuple(sorted(found, key=lambda s: (-s.share, s.row_id, s.other)))


def _bins(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """`token_bin` of many ids."""
    return ((ids.astype(np.uint32) * np.uint32(2654435761)) >> np.uint32(22)).astype(np.int64)
