"""Whether the draft is worth its place: accept length by domain, and throughput under the serving policy: tables of
gate-deployment."""

from __future__ import annotations

import math
from typing import Any

from stages.contracts.evidence import AcceptLength
from stages.contracts.params import Params
from stages.gates._deployment_evidence import BENCHMARK, Evidence
from stages.gates._judge import Expectation, Table, at_most, between, same

_INERT = 1.02  # tokens a verification; SGLang serves a draft without lm_head, HTTP 200, at exactly 1.00
_CEILING = 0.995  # of the most there can be; every draft accepted is a draft compared with itself, or NaN logits
_POLICY_COLUMNS = ["load", "ratio", "draft_steps", "draft_steps_by_policy", "words", "off_cost_ratio", "off_words"]


def accept(e: Evidence, params: Params) -> Table:
    """Accept length (tokens a verification) overall and by domain, against thresholds and the last release."""
    import pandas as pd

    gate, release = params.gates.deployment, e.release
    before = {"overall": release.accept_length, **release.accept_length_by_domain} if release else {}
    found: dict[str, AcceptLength | None] = {"overall": e.serve.served, **e.serve.served_by_domain}
    least = {"overall": gate.min_accept_length, **gate.min_domain_accept_length}
    lines = [
        _accept_line(name, found.get(name), least.get(name, 1.0), before.get(name), gate.max_accept_length_loss)
        for name in dict.fromkeys([*found, *least])
    ]
    most = (e.serve.draft_steps + 1) * _CEILING
    return Table("accept length", pd.DataFrame(lines), "domain", _accept_expectations(most))


def _accept_line(
    name: str, found: AcceptLength | None, least: float, before: float | None, loss: float
) -> dict[str, Any]:
    length = found.accept_length if found else math.nan
    interval = f"{found.low:.2f} to {found.high:.2f}, {found.requests} requests" if found else "not served"
    return {
        "domain": name,
        "accept_length": length,
        "least": least,
        "least_by_release": before - loss if before is not None else 0.0,
        "words": f"{length:.3f} ({interval}), least {least:g}",
        "release_words": f"{length:.3f} against {before:.3f} of the last release"
        if before is not None
        else "no earlier release",
    }


def _accept_expectations(most: float) -> tuple[Expectation, ...]:
    more = "more distinct prompts help most: raise limits in prepare.sources, then `dvc repro`"
    return (
        at_most(
            "least",
            "accept_length",
            says="accept length reaches its threshold",
            why="below it a verification costs more than it brings",
            do=more,
            tell="words",
        ),
        between(
            "accept_length",
            _INERT,
            says="the draft does something",
            why="1.00 is a draft whose guesses are never taken: a tensor not loaded, states not fed",
            do="look at tables tensors, config and parity first; then serve one prompt with the engine's log on",
        ),
        between(
            "accept_length",
            high=round(most, 3),
            says="accept length is below its ceiling",
            why="every guess taken is no draft: the target serves as its own, or NaN passes verification",
            do="check that models/draft is what the engine loaded",
        ),
        at_most(
            "least_by_release",
            "accept_length",
            says="accept length is not below the last release's by more than gates.deployment.max_accept_length_loss",
            why="a weekly retrain that loses a domain should not replace a draft that has it",
            do="compare `dvc params diff` and the sources' rows with the release's; keep the release until it is mended",
            tell="release_words",
        ),
    )


def _told_apart(ratio: float, high: float, least: float) -> float:
    """The ratio to judge: below plain decoding counts only when the whole interval lies there. benchmark widens the
    intervals of the policy's loads so that all hold at once; its raw ratios would refuse a draft for a few noisy repeats."""
    return ratio if high < 1 else max(ratio, least)


def speed_up(e: Evidence, params: Params) -> Table:
    """Every speculative arm: its speed-up over plain decoding against the tokens that a pass of the target brought it."""
    import pandas as pd

    tolerance = params.gates.deployment.max_speedup_over_accept_length
    lengths = {(a.name, a.draft_steps, a.concurrency): a.accept_length for a in e.benchmark.arms}
    drafted = [r for r in e.benchmark.ratios if r.arm == "speculative"]
    lines: list[dict[str, Any]] = []
    for r in drafted:
        length = lengths.get((r.arm, r.draft_steps, r.concurrency), math.nan)
        lines.append(
            {
                "load": f"concurrency {r.concurrency}, {r.draft_steps} draft steps",
                "speed_up": r.low,
                "most": length * tolerance,
                "words": f"{r.ratio:.3f} × plain ({r.low:.3f} to {r.high:.3f}) at accept length {length:.3f}",
            }
        )
    check = at_most(
        "speed_up",
        "most",
        says="speed-up is not above accept length",
        why="a pass of the target costs at least what a plain step costs: more than that means that arms did unequal work, or that "
        "one was served from a cache",
        do="compare prompts, answer lengths, cached tokens and settings of both arms, then " + BENCHMARK,
        tell="words",
    )
    return Table("speed-up", pd.DataFrame(lines, columns=["load", "speed_up", "most", "words"]), "load", (check,))


def policy(e: Evidence, params: Params) -> Table:
    """Every load measured: throughput under the serving policy over plain decoding, and the draft steps it used."""
    import pandas as pd

    ratios = {r.concurrency: r for r in e.benchmark.ratios if r.arm == "policy"}
    least = params.gates.deployment.min_policy_throughput_ratio
    lines: list[dict[str, Any]] = []
    for concurrency in sorted({a.concurrency for a in e.benchmark.arms} | set(ratios)):
        r = ratios.get(concurrency)
        lines.append(
            {
                "load": f"concurrency {concurrency}",
                "ratio": _told_apart(r.ratio, r.high, least) if r else math.nan,
                "draft_steps": r.draft_steps if r else -1,
                "draft_steps_by_policy": e.policy.steps_for(concurrency),
                "words": f"{r.ratio:.3f} × plain ({r.low:.3f} to {r.high:.3f}), {r.draft_steps} draft steps, on {e.benchmark.device}"
                if r
                else "the policy was not measured here",
            }
        )
    off, off_high = e.benchmark.off_cost_ratio, e.benchmark.off_cost_high
    never_had_one = "off is an engine that never had a draft, as replicas behind a router are"
    for line in lines:
        line["off_cost_ratio"] = _told_apart(off, off_high or off, least) if off is not None else 1.0
        line["off_words"] = f"{off:.3f} × an engine that never had a draft" if off is not None else never_had_one
    checks = (
        between(
            "ratio",
            least,
            says="the serving policy is never slower than plain decoding",
            why="speculation pays with compute that a full batch does not have",
            do="raise benchmark.repeats when the interval is wide; otherwise " + BENCHMARK,
            tell="words",
        ),
        same(
            "draft_steps",
            "draft_steps_by_policy",
            says="the policy measured is the policy written",
            why="a table that says something else than was timed promises nothing",
            do=BENCHMARK,
        ),
        between(
            "off_cost_ratio",
            least,
            says="switched off, speculation costs nothing",
            why="an engine that keeps drafting state while off is slower than one that never had a draft",
            do="look for work done for the draft at zero draft steps in the engine",
            tell="off_words",
        ),
    )
    return Table("policy", pd.DataFrame(lines, columns=_POLICY_COLUMNS), "load", checks)
