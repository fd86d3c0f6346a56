"""The whole of data/prepared out of candidates and answers; the manifest goes last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.files import file_digest
from stages.contracts.manifest import PreparedManifest, PreparedSource, TargetIdentity
from stages.corpus.answers import Generated
from stages.corpus.gather import Candidate, Gathered, demand_rows
from stages.corpus.items import Reject
from stages.corpus.rows import OUT_OF_DISTRIBUTION, REJECTS, ROWS, Row, make_row, write_table

if TYPE_CHECKING:
    from stages.contracts.params import Prepare


def write_prepared(
    folder: Path,
    gathered: list[Gathered],
    apart: list[Candidate],
    answers: Mapping[str, Generated],
    prepare: Prepare,
    target: TargetIdentity,
    end_ids: frozenset[int],
    decode: Callable[[Any], str],
) -> PreparedManifest:
    """Fill `folder`: rows of every source, prompts kept apart, rejects, and prepared.json last.

    Args:
        apart: the out-of-distribution prompts.
        end_ids: token ids that end a turn.
        decode: ids to text.

    Raises:
        DataError: a source of which no row is left.
    """
    sources, rejects = [], []
    for of_source in gathered:
        wanted = (make_row(c, answers, of_source.source, prepare, end_ids, decode) for c in of_source.candidates)
        written, late = _write_rows(folder / of_source.source.name / "rows.parquet", wanted)
        of_this = [*of_source.rejects, *late]
        demand_rows(of_source.source.name, written["rows"], of_this)
        rejects += [{"source": of_source.source.name, **vars(r)} for r in of_this]
        sources.append(_describe(of_source, written, of_this, folder))
    write_table(folder / "rejects.parquet", REJECTS, rejects)
    write_table(
        folder / "out_of_distribution.parquet",
        OUT_OF_DISTRIBUTION,
        (
            {
                "prompt_id": c.prompt_id,
                "domain": "out_of_distribution",
                "input_ids": c.prompt_ids,
                "messages": c.messages,
            }
            for c in apart
        ),
    )
    manifest = PreparedManifest(
        target=target,
        seed=prepare.seed,
        temperature=prepare.temperature,
        max_new_tokens=prepare.max_new_tokens,
        answered_by=prepare.answers.name,
        template_arguments=prepare.rendering.template_arguments,
        sources=tuple(sources),
        out_of_distribution_prompts=len(apart),
        out_of_distribution_digest=file_digest(folder / "out_of_distribution.parquet"),
        rejects_digest=file_digest(folder / "rejects.parquet"),
    )
    manifest.write(folder / "prepared.json")
    return manifest


def _write_rows(path: Path, wanted: Iterator[Row | Reject]) -> tuple[Counter[str], list[Reject]]:
    """Write the rows, count them, and give back those that were not kept."""
    counts: Counter[str] = Counter()
    rejects: list[Reject] = []

    def kept() -> Iterator[Row]:
        for row in wanted:
            if isinstance(row, Reject):
                rejects.append(row)
                continue
            counts["rows"] += 1
            counts[row.split] += 1
            counts["tokens"] += len(row.input_ids)
            counts["supervised"] += int(row.loss_mask.sum())
            counts["capped"] += row.finish == "capped"
            counts["repetitive"] += row.repetitive
            yield row

    write_table(path, ROWS, kept())
    return counts, rejects


def _describe(of_source: Gathered, counts: Counter[str], rejects: list[Reject], folder: Path) -> PreparedSource:
    source = of_source.source
    reasons = Counter(r.reason for r in rejects)
    kept = counts["rows"] + sum(reasons.values()) - of_source.extra_rows
    assert of_source.rows_read == kept, f"{source.name}: rows do not add up"
    return PreparedSource(
        name=source.name,
        domain=source.domain,
        licence=source.licence,
        kind=source.kind,
        answers=source.answers,
        origin_digest=of_source.origin_digest,
        rows_read=of_source.rows_read,
        rows=counts["rows"],
        train_rows=counts["train"],
        held_out_rows=counts["held_out"],
        tokens=counts["tokens"],
        supervised_tokens=counts["supervised"],
        capped=counts["capped"],
        repetitive=counts["repetitive"],
        extra_rows=of_source.extra_rows,
        rejects=dict(sorted(reasons.items())),
        rows_digest=file_digest(folder / source.name / "rows.parquet"),
    )


def table(manifest: PreparedManifest) -> str:
    """The manifest's sources as a table for a terminal."""
    head = ("source", "read", "rows", "train", "held out", "tokens", "supervised", "capped", "rejected")
    lines = [head, *(_line(s) for s in manifest.sources)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:-1], widths[1:], strict=True)), line[-1]]
        )
        for line in lines
    )


def _line(s: PreparedSource) -> tuple[str, ...]:
    numbers = (s.rows_read, s.rows, s.train_rows, s.held_out_rows, s.tokens, s.supervised_tokens, s.capped)
    rejected = ", ".join(f"{count} {reason}" for reason, count in s.rejects.items()) or "none"
    return (s.name, *(f"{n:,}" for n in numbers), rejected)
