"""A release's model card: Markdown for a person, from facts alone, so that equal facts give equal bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flows.artifacts import accept_rows, policy_markdown, throughput_rows
from stages.contracts.beside import BESIDE, BesideProduction
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    BenchmarkEvidence,
    ServeEvidence,
    ServingPolicy,
)
from stages.contracts.manifest import PreparedManifest
from stages.contracts.report import GATE_REPORTS, GateReport

CARD = "model_card.md"
_LIMIT_S = 120


def model_card(root: Path, prepared: Path | None) -> bytes:
    """The card of the draft in models/draft.

    Args:
        prepared: the manifest of the rows it was trained on, where it is at hand.

    Raises:
        DataError: a fact that it needs is missing or damaged.
    """
    draft = DraftRecord.read(root / DRAFT / DRAFT_RECORD)
    served = ServeEvidence.read(root / SERVE_EVIDENCE)
    measured = BenchmarkEvidence.read(root / BENCHMARK_EVIDENCE)
    parts = [
        _head(draft, served),
        _points(draft, feeding(root / DRAFT)),
        _data(draft, PreparedManifest.read(prepared) if prepared else None),
        "## Accept length\n\n"
        f"Tokens a verification, bonus included, served by {served.engine} {served.engine_version}, chain of "
        f"{served.draft_steps}, at most {served.max_new_tokens} new tokens; plain decoding is 1.0.\n\n"
        + _table(accept_rows(served)),
        _beside(root / BESIDE, draft.digest()),
        f"## Throughput\n\n{measured.engine} {measured.engine_version} on {measured.device}, {measured.repeats} repeats.\n\n"
        + _table(throughput_rows(measured)),
        "#" + policy_markdown(ServingPolicy.read(root / POLICY)),
        _gates(root),
    ]
    return ("\n\n".join(part for part in parts if part) + "\n").encode()


def _head(draft: DraftRecord, served: ServeEvidence) -> str:
    t = draft.target
    return (
        f"# {draft.algorithm} draft for {t.name}\n\n"
        + _table(
            [
                {"": "target", "fact": f"{t.name} ({t.model_type}, {t.layers} layers, H {t.hidden_size}, V {t.vocab_size})"},
                {"": "target's weights", "fact": f"`{t.weights_digest}`"},
                {"": "tokenizer", "fact": f"`{t.tokenizer_digest}`"},
                {"": "chat template", "fact": f"`{t.template_digest}`"},
                {"": "draft", "fact": f"`{draft.digest()}`"},
                {"": "draft vocabulary", "fact": f"{draft.draft_vocab_size} of {t.vocab_size} tokens"},
                {"": "training", "fact": f"{draft.optimizer_steps} optimizer steps, {draft.steps_ahead} steps ahead, "
                 f"{draft.supervised_tokens_seen} supervised tokens seen"},
                {"": "validated with", "fact": f"{served.engine} {served.engine_version}"},
            ]
        )
    )  # fmt: skip


def _points(draft: DraftRecord, fed: list[dict[str, Any]]) -> str:
    points = ", ".join(map(str, draft.points))
    ids = ", ".join(map(str, draft.layer_ids))
    text = (
        f"## Points\n\nTrained on the states after {points} of {draft.target.layers} layers. config.json is written for "
        f"{draft.exported_for}: layer ids {ids}. Another engine, or another version, may read the same ids as other layers."
    )
    rows = [
        {"engine": f["engine"], "targets": f["target"], "points it would feed": f["fed"], "as trained": f["as_trained"]}
        for f in fed
    ]
    return f"{text}\n\n{_table(rows)}" if rows else text


def feeding(draft: Path) -> list[dict[str, Any]]:
    """Which points each engine and version would feed a draft, as `python -m stages.glance` tells; nothing where it cannot
    tell, as of weights that are no safetensors file."""
    weights = draft / "model.safetensors"
    with weights.open("rb") as file:
        if file.read(9)[8:] != b"{":
            return []
    command = [sys.executable, "-m", "stages.glance", str(draft.absolute()), "--json"]
    told = subprocess.run(
        command,
        cwd=draft.parents[1],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    try:
        return list(json.loads(told.stdout)["facts"]["fed_by"])
    except (ValueError, KeyError, TypeError):
        return []


def _data(draft: DraftRecord, prepared: PreparedManifest | None) -> str:
    if prepared is None:
        return f"## Data\n\nMerged set `{draft.merged_digest}`; its sources are not at hand here."
    rows = [
        {
            "source": s.name,
            "domain": s.domain,
            "licence": s.licence,
            "answers": "the target's own" if s.answers == "regenerate" else "given",
            "rows": s.rows,
            "held out": s.held_out_rows,
            "supervised tokens": s.supervised_tokens,
            "origin": f"`{s.origin_digest}`",
        }
        for s in prepared.sources
    ]
    licences = ", ".join(sorted({s.licence for s in prepared.sources}))
    return f"## Data\n\nMerged set `{draft.merged_digest}`. Licences: {licences}.\n\n{_table(rows)}"


def _beside(path: Path, draft: str) -> str:
    if not path.exists():
        return ""
    told = BesideProduction.read(path)
    if told.draft_digest != draft:
        return ""
    rows = [
        {"domain": n, "new": f"{d.new:.3f}", "production": f"{d.production:.3f}", "difference": f"{d.low:+.3f}..{d.high:+.3f}"}
        for n, d in sorted(told.accept_length.items())
    ]  # fmt: skip
    return f"## Beside production\n\nDraft `{told.production_draft_digest}`, the same requests in the same run.\n\n{_table(rows)}"


def _gates(root: Path) -> str:
    rows: list[dict[str, Any]] = []
    for gate in ("extraction", "training", "deployment"):
        report = GateReport.read(root / GATE_REPORTS / f"{gate}.json")
        passed = sum(c.success for c in report.checks)
        rows.append(
            {"gate": gate, "passed": f"{passed} of {len(report.checks)} checks", "report": f"`{report.digest()}`"}
        )
    return f"## Gates\n\n{_table(rows)}"


def _table(rows: Iterable[dict[str, Any]]) -> str:
    """A Markdown table; every row has the first one's columns."""
    rows = list(rows)
    if not rows:
        return "Nothing was measured."
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([row.get(c) for c in columns] for row in rows)]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
