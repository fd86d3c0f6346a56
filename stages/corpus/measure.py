"""What the written rows are like: counts that gate-extraction judges, taken while the rows are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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

    def take(self, rows: pa.RecordBatch) -> Counter[str]:
        """Take in rows as columns of rows.ROWS, all of one domain.

        Returns:
            How many rows, tokens, supervised ones, capped and repetitive rows they are, and rows by split.
        """
        ids, starts = _flat(rows.column("input_ids"))
        mask, _ = _flat(rows.column("loss_mask"))
        lengths = np.diff(starts)
        supervised = ids[mask == 1]
        capped = rows.column("finish").to_pylist().count("capped")
        counts = Counter(rows.column("split").to_pylist())
        counts |= Counter(rows=rows.num_rows, tokens=len(ids), supervised=len(supervised), capped=capped)
        counts["repetitive"] = rows.column("repetitive").to_pylist().count(True)
        of = self._domains.setdefault(rows.column("domain")[0].as_py(), _Domain())
        of.rows += rows.num_rows
        of.tokens += len(ids)
        of.supervised += len(supervised)
        of.capped += capped
        of.lengths += np.bincount(np.minimum(np.frexp(lengths)[1] - 1, LENGTH_BINS - 1), minlength=LENGTH_BINS)
        of.bins += np.bincount(_bins(supervised), minlength=TOKEN_BINS)
        if self._rows:
            for prompt, row in zip(
                rows.column("prompt_id").to_pylist(), rows.column("row_id").to_pylist(), strict=True
            ):
                if prompt in self._rows:
                    self._rows[prompt] = row
        return counts

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


def _flat(column: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """The values of a column of lists, one row after the other, and where each row starts, with the end of the last."""
    starts = column.offsets.to_numpy()
    return column.values.to_numpy()[starts[0] : starts[-1]], starts - starts[0]


def _bins(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """`token_bin` of many ids."""
    return ((ids.astype(np.uint32) * np.uint32(2654435761)) >> np.uint32(22)).astype(np.int64)
