"""How the line stands: a record a stage, from the facts that the stages left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from stages.contracts.draft import DraftRecord
from stages.contracts.evidence import BenchmarkEvidence, ServeEvidence, TrainMetrics
from stages.contracts.manifest import CaptureManifest, MergedManifest, PreparedManifest
from stages.contracts.report import GateName, GateReport
from stages.glancing.figures import of_capture, of_merged, of_prepared
from stages.glancing.told import Facts

_DONE = ("done", "passed")
_REPRO = "dvc repro "


class LineLike(Protocol):
    """The line's facts, None where a stage has left none."""

    @property
    def prepared(self) -> PreparedManifest | None: ...
    @property
    def capture(self) -> CaptureManifest | None: ...
    @property
    def merged(self) -> MergedManifest | None: ...
    @property
    def draft(self) -> DraftRecord | None: ...
    @property
    def train(self) -> TrainMetrics | None: ...
    @property
    def serve(self) -> ServeEvidence | None: ...
    @property
    def benchmark(self) -> BenchmarkEvidence | None: ...
    @property
    def reports(self) -> Mapping[GateName, GateReport]: ...
    def verdict(self, gate: GateName) -> str: ...


def stand(line: LineLike, changed: Mapping[str, Sequence[str]] | None = None) -> list[Facts]:
    """A record a stage, in the graph's order: stage, state (done, passed, refused, stale, missing) and its figures.

    Args:
        changed: for a stage that ran with other parameters than those of now, which, in words.
    """
    draft = line.draft.digest() if line.draft else None

    def state(there: bool, fresh: bool) -> str:
        return "missing" if not there else "done" if fresh else "stale"

    prepared = line.prepared.digest() if line.prepared else None
    capture = line.capture.digest() if line.capture else None
    merged = line.merged.digest() if line.merged else None
    captured_of = line.capture.prepared_digest if line.capture else None
    merged_of = (line.merged.prepared_digest, line.merged.capture_digest) if line.merged else None
    records: list[Facts] = [
        {
            "stage": "prepare",
            "state": state(prepared is not None, True),
            **(of_prepared(line.prepared) if line.prepared else {}),
        },
        _gate(line, "extraction"),
        {
            "stage": "extract",
            "state": state(capture is not None, captured_of == prepared),
            **(of_capture(line.capture) if line.capture else {}),
        },
        {
            "stage": "merge",
            "state": state(merged is not None, merged_of == (prepared, capture)),
            **(of_merged(line.merged) if line.merged else {}),
        },
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
    return _flow_on([_overtaken(record, changed or {}) for record in records])


def _overtaken(record: Facts, changed: Mapping[str, Sequence[str]]) -> Facts:
    """A stage that ran with other parameters is stale, and says which."""
    words = changed.get(str(record["stage"]))
    if not words or record["state"] == "missing":
        return record
    return {"stage": record["stage"], "state": "stale", "params_changed": list(words)}


def to_do(records: Sequence[Facts]) -> str | None:
    """The next command: for the first stage that is not done. None when all are."""
    first = next((s for s in records if s["state"] not in _DONE), None)
    if first is None:
        return None
    if first["state"] == "refused":
        gate = str(first["stage"]).removeprefix("gate-")
        return f"do what reports/gates/{gate}.json says, then dvc repro"
    return "dvc repro"


def still_to_do(steps: Sequence[str], records: Sequence[Facts]) -> list[str]:
    """`steps` without the stages of `dvc repro` commands that are done."""
    done = {str(r["stage"]) for r in records if r["state"] in _DONE}
    found: list[str] = []
    for step in steps:
        if step.startswith(_REPRO):
            left = [name for name in step.removeprefix(_REPRO).split() if name not in done]
            step = _REPRO + " ".join(left) if left else ""
        found += [step] if step else []
    return found


def _flow_on(records: list[Facts]) -> list[Facts]:
    """What was made of something stale is stale too, whatever it says of itself."""
    stale = False
    for record in records:
        if stale and record["state"] in ("done", "passed"):
            record["state"] = "stale"
        stale = stale or record["state"] == "stale"
    return records


def _gate(line: LineLike, gate: GateName) -> Facts:
    facts: Facts = {"stage": f"gate-{gate}", "state": line.verdict(gate)}
    if report := line.reports.get(gate):
        facts |= {"checks": len(report.checks), "failed": [c.assertion for c in report.checks if not c.success]}
    return facts


def _trained(line: LineLike) -> Facts:
    if line.train is None:
        return {}
    return {
        "optimizer_steps": line.train.optimizer_steps,
        "simulated_accept_length": round(line.train.overall.accept_length, 3),
        "held_out_loss": round(line.train.held_out_loss, 3),
    }


def _served(line: LineLike) -> Facts:
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


def _measured(line: LineLike) -> Facts:
    if line.benchmark is None:
        return {}
    policy = sorted((r for r in line.benchmark.ratios if r.arm == "policy"), key=lambda r: r.concurrency)
    return {
        "policy_over_plain": {str(r.concurrency): round(r.ratio, 3) for r in policy},
        "speculation_off_above": line.benchmark.speculation_off_above,
    }
