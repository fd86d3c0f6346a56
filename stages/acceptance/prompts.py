"""The prompts that drafts are measured on: held-out ones of every source, and the out-of-distribution set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import pyarrow.parquet as pq

from stages.contracts.errors import DataError
from stages.contracts.files import file_digest
from stages.contracts.manifest import PREPARED, PreparedManifest, renewal


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids and, when it has a row, the ids of the stored answer (first supervised run) and how it ended."""

    prompt_id: str
    source: str
    domain: str
    ids: tuple[int, ...]
    row_id: str = ""
    answer: tuple[int, ...] = ()
    finish: str = ""


def held_out_prompts(prepared: PreparedManifest, per_source: int | None = None) -> list[Prompt]:
    """Held-out prompts, sources taking turns, at most `per_source` of each.

    Within a source they come by prompt id, a hash: a fair sample, and the same one when rows are added.

    Raises:
        DataError: a file that is not the one the manifest digested, or no held-out row at all.
    """
    sources = []
    for source in prepared.sources:
        path = PREPARED / source.name / "rows.parquet"
        _demand(path, source.rows_digest)
        table = pq.read_table(path, filters=[("split", "==", "held_out")]).to_pylist()
        prompts = [_prompt(row) for row in sorted(table, key=lambda row: row["prompt_id"])]
        sources.append(prompts[:per_source])
    mixed = [p for p in chain.from_iterable(zip_longest(*sources)) if p is not None]
    if not mixed:
        raise DataError(
            "No held-out prompts to measure a draft on",
            where=str(PREPARED),
            expected="at least one row with split held_out",
            do="raise prepare.held_out_share or the sources' limits, then `dvc repro`",
        )
    return mixed


def _prompt(row: dict[str, object]) -> Prompt:
    ids, mask, start = row["input_ids"], row["loss_mask"], row["prompt_tokens"]
    assert isinstance(ids, list) and isinstance(mask, list) and isinstance(start, int)
    end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
    named = {name: str(row[name]) for name in ("prompt_id", "source", "domain", "row_id", "finish")}
    return Prompt(ids=tuple(ids[:start]), answer=tuple(ids[start:end]), **named)


def out_of_distribution_prompts(prepared: PreparedManifest, limit: int) -> list[Prompt]:
    """At most `limit` prompts of kinds that were not trained on.

    Raises:
        DataError: the file is not the one the manifest digested.
    """
    path = PREPARED / "out_of_distribution.parquet"
    _demand(path, prepared.out_of_distribution_digest)
    rows = pq.read_table(path, columns=["prompt_id", "domain", "input_ids"]).to_pylist()
    return [Prompt(r["prompt_id"], "out_of_distribution", r["domain"], tuple(r["input_ids"])) for r in rows[:limit]]


def take(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts from the front, going round again when there are fewer."""
    return [prompts[i % len(prompts)] for i in range(count)]


def _demand(path: Path, expected: str) -> None:
    if (got := file_digest(path)) != expected:
        raise DataError(
            "Prepared prompts are not those that were written",
            where=str(path),
            expected=expected,
            got=got,
            do=renewal(path, "prepare"),
        )
