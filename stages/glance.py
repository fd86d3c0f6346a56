"""glance: how the line stands, or what a path is. `python -m stages.glance [PATH] [--json]`; of prepared rows, one as the
model sees it: `python -m stages.glance data/prepared ROW [--html]`

Reads only the JSON that the stages left, so it answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.draft import DRAFT_RECORD, DraftRecord
from stages.contracts.errors import LineError, run
from stages.contracts.files import Fact
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    MERGED_MANIFEST,
    PREPARED_MANIFEST,
    CaptureManifest,
    CaptureSpec,
    FolderConfig,
    MergedManifest,
    PreparedManifest,
)
from stages.contracts.report import GateName
from stages.contracts.repository import demand_repository
from stages.glance_row import show_row
from stages.reporting.facts import Line, read_line
from stages.reporting.page import PAGE

if TYPE_CHECKING:
    from rich.table import Table

Facts = dict[str, Any]
_COLOUR = {"passed": "green", "done": "green", "refused": "red", "stale": "yellow", "missing": "dim"}


def stand(line: Line) -> list[Facts]:
    """A record a stage, in the graph's order: stage, state (done, passed, refused, stale, missing) and its figures."""
    draft = line.draft.digest() if line.draft else None

    def state(there: bool, fresh: bool) -> str:
        return "missing" if not there else "done" if fresh else "stale"

    prepared = line.prepared.digest() if line.prepared else None
    capture = line.capture.digest() if line.capture else None
    merged = line.merged.digest() if line.merged else None
    captured_of = line.capture.prepared_digest if line.capture else None
    merged_of = (line.merged.prepared_digest, line.merged.capture_digest) if line.merged else None
    return [
        {"stage": "prepare", "state": state(prepared is not None, True), **_prepared(line)},
        _gate(line, "extraction"),
        {"stage": "extract", "state": state(capture is not None, captured_of == prepared), **_captured(line)},
        {"stage": "merge", "state": state(merged is not None, merged_of == (prepared, capture)), **_merged(line)},
        _gate(line, "training"),
        {
            "stage": "train",
            "state": state(draft is not None, bool(line.draft and line.draft.merged_digest == merged)),
            **_trained(line),
        },
        {
            "stage": "serve-validate",
            "state": state(line.serve is not None, bool(line.serve and line.serve.draft_digest == draft)),
            **_served(line),
        },
        {
            "stage": "benchmark",
            "state": state(line.benchmark is not None, bool(line.benchmark and line.benchmark.draft_digest == draft)),
            **_measured(line),
        },
        _gate(line, "deployment"),
    ]


def _gate(line: Line, gate: GateName) -> Facts:
    facts: Facts = {"stage": f"gate-{gate}", "state": line.verdict(gate)}
    if report := line.reports.get(gate):
        facts |= {"checks": len(report.checks), "failed": [c.assertion for c in report.checks if not c.success]}
    return facts


def _prepared(line: Line) -> Facts:
    if line.prepared is None:
        return {}
    sources = line.prepared.sources
    return {
        "target": line.prepared.target.name,
        "sources": len(sources),
        "rows": sum(s.rows for s in sources),
        "held_out_rows": sum(s.held_out_rows for s in sources),
        "tokens": sum(s.tokens for s in sources),
        "supervised_tokens": sum(s.supervised_tokens for s in sources),
    }


def _captured(line: Line) -> Facts:
    if line.capture is None:
        return {}
    c = line.capture
    return {"rows": c.rows, "tokens": c.tokens, "folders": len(c.folders), "points": list(c.capture.points)}


def _merged(line: Line) -> Facts:
    if line.merged is None:
        return {}
    m = line.merged
    return {"rows": m.rows, "draft_vocab_size": m.draft_vocab_size, "held_out_coverage": round(m.coverage.held_out, 4)}


def _trained(line: Line) -> Facts:
    if line.train is None:
        return {}
    return {
        "optimizer_steps": line.train.optimizer_steps,
        "simulated_accept_length": round(line.train.overall.accept_length, 3),
        "held_out_loss": round(line.train.held_out_loss, 3),
    }


def _served(line: Line) -> Facts:
    if line.serve is None:
        return {}
    return {
        "accept_length": round(line.serve.served.accept_length, 3),
        "accept_length_by_domain": {
            n: round(a.accept_length, 3) for n, a in sorted(line.serve.served_by_domain.items())
        },
        "identical_answers": line.serve.greedy.identical,
        "answers": line.serve.greedy.requests,
        "points_fed": line.serve.parity_words,
    }


def _measured(line: Line) -> Facts:
    if line.benchmark is None:
        return {}
    policy = sorted((r for r in line.benchmark.ratios if r.arm == "policy"), key=lambda r: r.concurrency)
    return {
        "policy_over_plain": {str(r.concurrency): round(r.ratio, 3) for r in policy},
        "speculation_off_above": line.benchmark.speculation_off_above,
    }


def describe(path: Path) -> Facts:
    """What stands at `path`, from the manifest in it or above it.

    Raises:
        LineError: nothing there says what it is.
    """
    kinds: list[tuple[str, type[Fact], str]] = [
        (PREPARED_MANIFEST.name, PreparedManifest, "prepared rows"),
        (MERGED_MANIFEST.name, MergedManifest, "merged rows and states"),
        (DRAFT_RECORD, DraftRecord, "draft"),
        (CAPTURE_MANIFEST.name, CaptureManifest, "hidden states"),
    ]
    folder = path if path.is_dir() else path.parent
    for at in (folder, folder.parent):
        for name, kind, what in kinds:
            if (at / name).exists():
                # a folder of rows and the folder of folders both call their manifest data_config.json
                single = name == CAPTURE_MANIFEST.name and at.name.startswith("rows_")
                fact = (FolderConfig if single else kind).read(at / name)
                return {"path": str(path), "what": "folder of hidden states" if single else what, **_of(fact)}
    raise LineError(
        "Nothing here says what it is",
        where=str(path),
        expected="a folder of data/prepared, data/hidden_states, data/merged or models/draft",
        got="no manifest" if path.exists() else "no such path",
        do="run `python -m stages.glance` without a path to see what there is",
    )


def _of(fact: Fact) -> Facts:
    if isinstance(fact, PreparedManifest):
        line = Line(Path(), prepared=fact)
        return {"digest": fact.digest(), **_prepared(line), "licences": {s.name: s.licence for s in fact.sources}}
    if isinstance(fact, FolderConfig):
        rows = {"source": fact.source, "rows": fact.end - fact.start, "tokens": fact.tokens, "bytes": fact.bytes}
        return {"digest": fact.digest(), **rows, **_points(fact.capture), "rows_digest": fact.rows_digest}
    if isinstance(fact, CaptureManifest):
        line = Line(Path(), capture=fact)
        return {
            "digest": fact.digest(),
            **_captured(line),
            **_points(fact.capture),
            "prepared_digest": fact.prepared_digest,
        }
    if isinstance(fact, MergedManifest):
        line = Line(Path(), merged=fact)
        named = {"prepared_digest": fact.prepared_digest, "capture_digest": fact.capture_digest}
        return {"digest": fact.digest(), **_merged(line), **_points(fact.capture), **named}
    assert isinstance(fact, DraftRecord)
    return {
        "digest": fact.digest(),
        "target": fact.target.name,
        "algorithm": fact.algorithm,
        **_points(fact.capture),
        "exported_for": fact.exported_for,
        "layer_ids_in_its_words": list(fact.layer_ids),
        "draft_vocab_size": fact.draft_vocab_size,
        "optimizer_steps": fact.optimizer_steps,
        "merged_digest": fact.merged_digest,
    }


def _points(spec: CaptureSpec) -> Facts:
    after = ", ".join(f"after {p}" for p in spec.points)
    words = f"{after} of {spec.layers} layers; the last state {spec.last_state.replace('_', ' ')}"
    return {"points": list(spec.points), "points_in_words": words, "hidden_size": spec.hidden_size}


def as_table(records: list[Facts]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("stage", "state", "figures"):
        table.add_column(name, overflow="fold")
    for record in records:
        figures = ", ".join(
            f"{k.replace('_', ' ')} {_say(v)}" for k, v in record.items() if k not in ("stage", "state")
        )
        state = str(record["state"])
        # as Text, since a name or a path may hold square brackets, which a plain string would take for markup
        table.add_row(record["stage"], Text(state, style=_COLOUR[state]), Text(figures))
    return table


def _say(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_say(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value)) if value and isinstance(value[0], str) else str(value) if value else "none"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    return "–" if value is None else str(value)


def show_line(as_json: bool) -> None:
    line = read_line()
    records = stand(line)
    if as_json:
        print(json.dumps({"stages": records, "unreadable": line.unreadable, "page": str(PAGE)}, indent=1))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(as_table(records))
    for fault in line.unreadable:
        console.print(Text.assemble(("unreadable", "red"), f" {fault}"))
    console.print(f"report: {PAGE}" if PAGE.exists() else "report: none yet, run `dvc repro`", style="dim")


def show_path(path: Path, as_json: bool) -> None:
    facts = describe(path)
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<{width}}  {_say(value)}")


def main() -> None:
    if show_row(sys.argv[1:]):
        return
    arguments = [a for a in sys.argv[1:] if a != "--json"]
    if len(arguments) > 1 or any(a.startswith("-") for a in arguments):
        raise LineError(
            "Glance at what?", where="command line", expected="at most one path, and --json", got=" ".join(sys.argv[1:])
        )
    as_json = "--json" in sys.argv[1:]
    if arguments:
        show_path(Path(arguments[0]), as_json)
    else:
        demand_repository()
        show_line(as_json)


if __name__ == "__main__":
    run(main)
