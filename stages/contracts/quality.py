"""What is known of prepared rows beyond their counts, for gate-extraction; and of the last rows that it accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from stages.contracts.files import Fact, canonical, digest
from stages.contracts.manifest import PreparedManifest

PREPARED_QUALITY = Path("data/prepared/quality.json")
ACCEPTED_DATASET = Path("reports/gates/accepted_dataset.json")
TOKEN_BINS = 1024
LENGTH_BINS = 24  # rows of 2^k .. 2^(k+1) - 1 tokens stand in bin k


class DomainQuality(Fact):
    """One domain. `lengths` counts rows by length; `token_bins` counts supervised tokens by `token_bin` of their id."""

    domain: str
    rows: int
    tokens: int
    supervised_tokens: int
    capped: int
    lengths: tuple[int, ...]
    token_bins: tuple[int, ...]


class SourceShare(Fact):
    """How much of the rows a source gave, and its weight in params.yaml when sources have weights."""

    source: str
    rows: int
    supervised_tokens: int
    weight: float | None


class SharedText(Fact):
    """A row, what its prompt is like or gives away (a row, or where a prompt stands), and how much of it, 0..1."""

    row_id: str
    other: str
    share: float


class PreparedQuality(Fact):
    """data/prepared/quality.json, of the rows as they were written; `rows_digest` names them (`digest_of_rows`). The lists
    name the first few of those counted."""

    version: Literal[1] = 1
    rows_digest: str
    tokenizer_digest: str
    domains: tuple[DomainQuality, ...]
    sources: tuple[SourceShare, ...]
    near_duplicates: int
    nearest: tuple[SharedText, ...]
    leaks: int
    leaking: tuple[SharedText, ...]


class AcceptedDataset(Fact):
    """reports/gates/accepted_dataset.json: the rows that gate-extraction let pass last, and those that it let pass before
    them, which they were compared with: judging the same rows again gives the same report."""

    version: Literal[1] = 1
    rows_digest: str
    tokenizer_digest: str
    domains: tuple[DomainQuality, ...]
    before: AcceptedDataset | None = None


def digest_of_rows(manifest: PreparedManifest) -> str:
    """One digest over the rows of all sources."""
    return digest(canonical({s.name: s.rows_digest for s in manifest.sources}))


def token_bin(token_id: int) -> int:
    """The bin of a token id, the same on every machine."""
    return (token_id * 2654435761 % 2**32) >> 22


def earlier_than(quality: PreparedQuality, accepted: AcceptedDataset | None) -> AcceptedDataset | None:
    """The dataset to compare with: the last one accepted that is not this one."""
    while accepted is not None and accepted.rows_digest == quality.rows_digest:
        accepted = accepted.before
    return accepted


def accept(quality: PreparedQuality, accepted: AcceptedDataset | None) -> AcceptedDataset:
    """The record after these rows passed; one dataset before them is kept."""
    before = earlier_than(quality, accepted)
    return AcceptedDataset(
        rows_digest=quality.rows_digest,
        tokenizer_digest=quality.tokenizer_digest,
        domains=quality.domains,
        before=None if before is None else before.model_copy(update={"before": None}),
    )
