"""The whole of data/prepared out of candidates and answers; the manifest goes last."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stages.contracts.files import file_digest
from stages.contracts.manifest import PreparedManifest, PreparedSource, TargetIdentity
from stages.contracts.progress import progress
from stages.contracts.quality import PREPARED_QUALITY
from stages.corpus.answers import Generated
from stages.corpus.gather import Corpus, Gathered, demand_rows
from stages.corpus.items import Reject
from stages.corpus.measure import Measures
from stages.corpus.rows import OUT_OF_DISTRIBUTION, REJECTS, ROWS, TableWriter, answered_rows, given_rows, write_table
from stages.corpus.spool import LateRejects, Tally, candidates_of

if TYPE_CHECKING:
    from stages.contracts.params import Prepare


def write_prepared(
    folder: Path,
    corpus: Corpus,
    answers: Mapping[str, Generated],
    prepare: Prepare,
    target: TargetIdentity,
    end_ids: frozenset[int],
    decode: Callable[[Any], str],
) -> PreparedManifest:
    """Fill `folder`: rows of every source, prompts kept apart, rejects, quality.json, and prepared.json last.

    Args:
        end_ids: token ids that end a turn.
        decode: ids to text.

    Raises:
        DataError: a source of which no row is left.
    """
    sources = []
    measures = Measures(corpus)
    total = sum(g.kept for g in corpus.gathered)
    with TableWriter(folder / "rejects.parquet", REJECTS) as rejects, progress(total, "rows", "written") as advance:
        for of_source in corpus.gathered:
            name = of_source.source.name
            made = _made(of_source, answers, prepare, end_ids, decode)
            late = LateRejects(of_source.spool)
            counts = _write_rows(folder / name / "rows.parquet", made, late, measures, advance)
            tally = Tally(Counter())
            for reject in itertools.chain(of_source.rejects(), late.read()):
                rejects.add({"source": name, **vars(tally.take(reject))})
            demand_rows(name, counts["rows"], tally)
            sources.append(_describe(of_source, counts, tally.reasons, folder))
    _write_apart(folder / "out_of_distribution.parquet", corpus)
    manifest = PreparedManifest(
        target=target,
        seed=prepare.seed,
        temperature=prepare.temperature,
        max_new_tokens=prepare.max_new_tokens,
        answered_by=prepare.answers.name,
        template_arguments=prepare.rendering.template_arguments,
        sources=tuple(sources),
        out_of_distribution_prompts=len(corpus.apart),
        out_of_distribution_digest=file_digest(folder / "out_of_distribution.parquet"),
        rejects_digest=file_digest(folder / "rejects.parquet"),
    )
    measures.done(manifest, {s.name: s.weight for s in prepare.sources}).write(folder / PREPARED_QUALITY.name)
    manifest.write(folder / "prepared.json")
    return manifest


def _write_apart(path: Path, corpus: Corpus) -> None:
    rows = (
        {
            "prompt_id": c.prompt_id,
            "domain": "out_of_distribution",
            "input_ids": c.prompt_ids,
            "messages": c.messages,
        }
        for c in corpus.apart
    )
    write_table(path, OUT_OF_DISTRIBUTION, rows)


def _made(
    of_source: Gathered,
    answers: Mapping[str, Generated],
    prepare: Prepare,
    end_ids: frozenset[int],
    decode: Callable[[Any], str],
) -> Iterator[tuple[pa.RecordBatch, list[Reject]]]:
    """Rows of a source as columns, and what became no row, batch by batch."""
    source = of_source.source
    for batch, wanted in of_source.batches():
        if source.answers == "given":
            yield given_rows(batch, wanted, source, prepare)
        else:
            yield answered_rows(candidates_of(batch, wanted), answers, source, prepare, end_ids, decode)


def _write_rows(
    path: Path,
    made: Iterator[tuple[pa.RecordBatch, list[Reject]]],
    late: LateRejects,
    measures: Measures,
    advance: Callable[..., None],
) -> Counter[str]:
    """Write the rows and count them; those that were not kept go to `late`."""
    counts: Counter[str] = Counter()
    with TableWriter(path, ROWS) as writer:
        for rows, rejects in made:
            advance(rows.num_rows + len(rejects))
            for reject in rejects:
                late.add(reject)
            if rows.num_rows:
                counts.update(measures.take(rows))
                writer.add_columns(rows)
    return counts


def _describe(of_source: Gathered, counts: Counter[str], reasons: Counter[str], folder: Path) -> PreparedSource:
    source = of_source.source
    kept = counts["rows"] + reasons.total() - of_source.extra_rows
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
        rejects=dict(sorted(reasons.items())),
        rows_digest=file_digest(folder / source.name / "rows.parquet"),
        extra_rows=of_source.extra_rows,
        shapes=dict(sorted(of_source.shapes.items())),
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
    ) + "".join(f"\n{s.name}: {_shapes(s)}" for s in manifest.sources if s.shapes)


def _shapes(s: PreparedSource) -> str:
    """What the rows of a source's files were."""
    return ", ".join(f"{count:,} {shape}" for shape, count in s.shapes.items())


def _line(s: PreparedSource) -> tuple[str, ...]:
    numbers = (s.rows_read, s.rows, s.train_rows, s.held_out_rows, s.tokens, s.supervised_tokens, s.capped)
    rejected = ", ".join(f"{count} {reason}" for reason, count in s.rejects.items()) or "none"
    return (s.name, *(f"{n:,}" for n in numbers), rejected)
