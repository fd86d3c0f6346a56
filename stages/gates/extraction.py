"""gate-extraction: prepared rows, before the target spends hours on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.manifest import renewal
from stages.contracts.params import Params
from stages.contracts.quality import digest_of_rows
from stages.gates._extraction_evidence import AGAIN, Evidence
from stages.gates._extraction_facts import row_facts
from stages.gates._extraction_quality import quality
from stages.gates._extraction_rows import row_expectations
from stages.gates._extraction_sources import sources
from stages.gates._extraction_splits import splits
from stages.gates._judge import Table, same

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Evidence", "tables"]


def tables(evidence: Evidence, params: Params) -> list[Table]:
    """Tables files, target, rows, sources, splits, quality; the order in which a person mends things."""
    asked = row_expectations(evidence, params)
    facts = row_facts(evidence, asked)
    return [
        _files(evidence.files),
        _target(evidence, params),
        Table("rows", facts.table, "row_id", asked, facts.rows),
        sources(evidence, facts, params),
        splits(facts, params),
        quality(evidence.quality, evidence.earlier, digest_of_rows(evidence.manifest), params.gates.extraction),
    ]


def _files(files: DataFrame) -> Table:
    check = same(
        "found",
        "recorded",
        says="every file holds the bytes that prepared.json recorded",
        why="rows changed after they were counted are not the rows that this report speaks of",
        do="for each file named: " + renewal(Path("FILE"), "prepare") + "; nothing edits data/prepared by hand",
    )
    return Table("files", files, "file", (check,))


def _target(evidence: Evidence, params: Params) -> Table:
    import pandas as pd

    was, now, asked = evidence.manifest.target, evidence.target, params.target
    pairs: list[tuple[str, Any, Any]] = [
        ("weights", was.weights_digest, now.weights_digest),
        ("tokenizer", was.tokenizer_digest, now.tokenizer_digest),
        ("chat template", was.template_digest, now.template_digest),
        ("model type", was.model_type, now.model_type),
        ("layers", asked.layers, now.layers),
        ("hidden size", asked.hidden_size, now.hidden_size),
        ("vocabulary", asked.vocab_size, now.vocab_size),
        ("seed", params.prepare.seed, evidence.manifest.seed),
        ("temperature", params.prepare.temperature, evidence.manifest.temperature),
        ("answer limit, tokens", params.prepare.max_new_tokens, evidence.manifest.max_new_tokens),
        ("engine of the answers", params.prepare.answers.name, evidence.manifest.answered_by),
        ("template arguments", params.prepare.rendering.template_arguments, evidence.manifest.template_arguments),
    ]
    rows = pd.DataFrame([{"item": i, "expected": str(a), "found": str(b)} for i, a, b in pairs])
    check = same(
        "found",
        "expected",
        says="rows were prepared for the target on this disk, by the params in force",
        why="ids of another tokenizer or template, or answers of other weights, teach the draft another model",
        do="mend target.* in params.yaml, or " + AGAIN + " for the target that is there",
    )
    return Table("target", rows, "item", (check,))
