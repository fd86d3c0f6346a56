"""What a run found, as Prefect artifacts: a table a gate, and the figures a person asks for first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    AcceptLength,
    BenchmarkEvidence,
    ServeEvidence,
    ServingPolicy,
)
from stages.contracts.report import GateReport

_FAILING_SHOWN = 10


def gate_markdown(report: GateReport) -> str:
    """A gate's report as Markdown: the verdict, then a row a check, the failed ones first."""
    failed = sum(not c.success for c in report.checks)
    verdict = "passed" if report.success else f"**refused** ({failed} of {len(report.checks)} checks)"
    rows = [
        f"# gate-{report.gate}: {verdict}",
        f"Judged: {report.subject}, `{report.subject_digest}`",
        "",
        "| | table | check | expected | got | failing | what to do |",
        "|---|---|---|---|---|---|---|",
    ]
    for check in sorted(report.checks, key=lambda c: c.success):
        shown = ", ".join(check.failing[:_FAILING_SHOWN])
        more = len(check.failing) - _FAILING_SHOWN
        cells = (
            "ok" if check.success else "**no**",
            f"{check.table}.{check.column}" if check.column else check.table,
            check.assertion,
            check.expected,
            check.actual,
            shown + (f" and {more} more" if more > 0 else ""),
            "" if check.success else check.do,
        )
        rows.append("| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |")
    return "\n".join(rows)


def accept_rows(evidence: ServeEvidence) -> list[dict[str, Any]]:
    """Accept length served and simulated, overall and by domain."""

    def row(name: str, served: AcceptLength, simulated: AcceptLength | None) -> dict[str, Any]:
        return {
            "domain": name,
            "served": round(served.accept_length, 3),
            "95 %": f"{served.low:.2f}..{served.high:.2f}",
            "simulated": round(simulated.accept_length, 3) if simulated else None,
            "requests": served.requests,
            "by position": " ".join(f"{p:.2f}" for p in served.by_position),
        }

    by_domain = [
        row(name, served, evidence.simulated_by_domain.get(name))
        for name, served in sorted(evidence.served_by_domain.items())
    ]
    return [row("all", evidence.served, evidence.simulated), *by_domain]


def throughput_rows(evidence: BenchmarkEvidence) -> list[dict[str, Any]]:
    """Tokens/s by concurrency and arm, with the ratio over plain decoding."""
    ratios = {(r.arm, r.draft_steps, r.concurrency): r for r in evidence.ratios}
    rows: list[dict[str, Any]] = []
    for arm in sorted(evidence.arms, key=lambda a: (a.concurrency, a.name, a.draft_steps)):
        ratio = ratios.get((arm.name, arm.draft_steps, arm.concurrency)) if arm.name != "plain" else None
        middle = sorted(arm.tokens_per_s)[len(arm.tokens_per_s) // 2]
        rows.append(
            {
                "concurrency": arm.concurrency,
                "arm": arm.name,
                "draft steps": arm.draft_steps,
                "tokens/s": round(middle, 1),
                "over plain": f"{ratio.ratio:.2f} ({ratio.low:.2f}..{ratio.high:.2f})" if ratio else "",
                "p50 ms": round(arm.latency_p50_ms),
                "p95 ms": round(arm.latency_p95_ms),
            }
        )
    return rows


def policy_markdown(policy: ServingPolicy) -> str:
    """The serving policy in words, and as a table."""
    rows = ["# Serving policy", "", "| running batch from | draft steps | over plain |", "|---|---|---|"]
    for span in policy.spans():
        steps, level = str(span.draft_steps) if span.draft_steps else "0 (plain decoding)", span.level
        told = f"{level.ratio:.2f} ({level.low:.2f}..{level.high:.2f})" if level else "not measured"
        rows.append(f"| {span.first} | {steps} | {told} |")
    words = [f"Measured up to a batch of {policy.measured_up_to}; plain decoding beyond it."]
    if policy.without_switching:
        words += ["", f"Where the engine cannot switch: {policy.without_switching.words}"]
    return "\n".join([*rows, "", *words])


def publish_gate(report: GateReport) -> None:
    """One artifact a gate, under its own key, so that Prefect keeps its history."""
    create_markdown_artifact(
        key=f"gate-{report.gate}",
        markdown=gate_markdown(report),
        description=f"{report.subject} {report.subject_digest}",
    )


def publish_stage(stage: str, root: Path) -> None:
    """The figures of serve-validate and benchmark, once they have run."""
    if stage == "serve-validate":
        served = ServeEvidence.read(root / SERVE_EVIDENCE)
        create_table_artifact(
            key="accept-length",
            table=accept_rows(served),
            description=f"tokens a verification, bonus included, chain of {served.draft_steps}; draft {served.draft_digest}",
        )
    if stage == "benchmark":
        measured = BenchmarkEvidence.read(root / BENCHMARK_EVIDENCE)
        create_table_artifact(
            key="throughput",
            table=throughput_rows(measured),
            description=f"{measured.engine} on {measured.device}, {measured.repeats} repeats; draft {measured.draft_digest}",
        )
        create_markdown_artifact(key="policy", markdown=policy_markdown(ServingPolicy.read(root / POLICY)))
