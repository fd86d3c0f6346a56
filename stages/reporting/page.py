"""reports/index.html: one self-contained page from whatever the line has written so far. No clock, no script, no network.

Equal facts give equal bytes. The words are in page.html, the looks in page.css; this file says what is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stages.contracts.evidence import AcceptLength, BenchmarkEvidence
from stages.contracts.files import write_whole
from stages.contracts.params import Params, load_params
from stages.contracts.report import Check
from stages.reporting.charts import Interval, Series, intervals, layers, lines, number
from stages.reporting.facts import GATES, Line, read_line

PAGE = Path("reports/index.html")
_GUARDS = {"extraction": "GPU hours", "training": "the training run", "deployment": "production"}
_STYLE = {"overall": "s0", "plain": "s1", "speculative": "s2", "policy": "s0"}


def write_page(root: Path = Path()) -> Path:
    """Render and write the page below `root`."""
    params = load_params(root / "params.yaml") if (root / "params.yaml").exists() else None
    write_whole(root / PAGE, render(read_line(root), params).encode())
    return root / PAGE


def render(line: Line, params: Params | None = None) -> str:
    """The page's HTML. Thresholds are drawn where params are given."""
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"count": number, "percent": _percent, "digest": _short, "code": _code}
    return environment.get_template("page.html").render(
        css=Markup((here / "page.css").read_text(encoding="utf-8")),
        line=line,
        params=params,
        target=line.prepared.target if line.prepared else line.draft.target if line.draft else None,
        verdict=verdict(line),
        figures=key_figures(line),
        former=bool(line.serve and not line.of_these_rows()),
        gates=[_gate(line, name) for name in GATES],
        guards=_GUARDS,
        points=_points(line),
        curves=_curves(line, params),
        accept=_accept(line, params),
        comparison=_comparison(line),
        throughput=_throughput(line.benchmark) if line.benchmark else None,
        policy=_policy(line),
        chain=_chain(line),
    )


def verdict(line: Line) -> dict[str, str]:
    """How it stands, in one sentence and one word for the style sheet; the earliest gate that did not pass decides."""
    for gate in GATES:
        state, report = line.verdict(gate), line.reports.get(gate)
        if state == "refused" and report:
            failed = [c for c in report.checks if not c.success]
            return {
                "style": "refused",
                "head": f"Refused before {_GUARDS[gate]}",
                "text": f"{len(failed)} of {len(report.checks)} checks of gate-{gate} failed. "
                + (
                    "The release that serves now stays as it is."
                    if gate == "deployment"
                    else "Nothing that was made before has been touched."
                ),
            }
        if state == "missing" and line.subject_digest(gate) is None:
            break
        if state in ("missing", "stale"):
            what = "has not judged this yet" if state == "missing" else "judged something older than what stands here"
            return {"style": "open", "head": "Not finished", "text": f"gate-{gate} {what}. Run dvc repro."}
    if line.verdict("deployment") == "passed":
        return {"style": "passed", "head": "Fit to serve", "text": "All three gates passed, on exactly this draft."}
    return {"style": "open", "head": "Not finished", "text": "There is no draft to judge yet. Run dvc repro."}


def key_figures(line: Line) -> list[tuple[str, str, str]]:
    """(figure, unit, what it is), for the top of the page."""
    figures: list[tuple[str, str, str]] = []
    if line.serve:
        served = line.serve.served
        note = f"accept length served, {served.low:.2f} to {served.high:.2f} at 95 %"
        figures.append((f"{served.accept_length:.2f}", "tokens a verification", note))
    if line.benchmark:
        one = min((r for r in line.benchmark.ratios if r.arm == "policy"), key=lambda r: r.concurrency, default=None)
        if one:
            figures.append((f"{one.ratio:.2f} ×", "plain decoding", f"policy, concurrency {one.concurrency}"))
        off = line.benchmark.speculation_off_above
        words = "always" if off is None else "never" if off == 0 else f"≤ {off}"
        figures.append((words, "requests at once", "where speculation is on"))
    if line.serve:
        greedy = line.serve.greedy
        figures.append(
            (
                f"{greedy.identical} / {greedy.requests}",
                "answers",
                f"identical to plain decoding, {greedy.near_ties} near tie{'s' * (greedy.near_ties != 1)}",
            )
        )
    elif line.prepared:
        rows = sum(s.rows for s in line.prepared.sources)
        figures.append((number(rows), "rows", "prepared"))
    return figures


def _gate(line: Line, name: Any) -> dict[str, Any]:
    report, state = line.reports.get(name), line.verdict(name)
    checks = report.checks if report else ()
    by_table: dict[str, list[Check]] = {}
    for check in checks:
        by_table.setdefault(check.table, []).append(check)
    words = {
        "passed": "passed",
        "refused": "refused",
        "stale": "judged something older",
        "missing": "has not judged yet",
    }
    return {
        "name": name,
        "state": state,
        "words": words[state],
        "checks": len(checks),
        "failed": [c for c in checks if not c.success],
        "by_table": by_table,
        "report": report,
    }


def _points(line: Line) -> dict[str, Any] | None:
    spec = line.merged.capture if line.merged else line.capture.capture if line.capture else None
    if spec is None:
        return None
    words = [f"the stream after {p} of {spec.layers} layers" for p in spec.points]
    return {
        "spec": spec,
        "chart": layers(spec.points, spec.layers),
        "words": "; ".join(words) + "; and the last state, before the final norm",
    }


def _curves(line: Line, params: Params | None) -> dict[str, Any] | None:
    found = {"training": line.training_curves.get("loss", []), "held out": line.held_out_curves.get("loss", [])}
    loss = [Series(name, points, f"s{2 * i}", dots=i > 0) for i, (name, points) in enumerate(found.items()) if points]
    held = [
        Series(name, points, _style(name, line), bounds=_interval(line) if name == "overall" else (), dots=True)
        for name, points in (sorted(_accept_columns(line).items(), key=lambda c: (c[0] != "overall", c[0])))
    ]
    if known := line.held_out_curves.get("train_like"):
        held.append(Series("rows trained on", known, "s4", dots=True))
    least = params.gates.deployment.min_accept_length if params else None
    if not loss and not held:
        return None
    return {
        "loss": lines(loss, title="Loss by step", x_label="optimizer step", y_label="loss, nats"),
        "loss_series": loss,
        "held": lines(
            held,
            title="Held-out accept length by step, simulated",
            x_label="optimizer step",
            y_label="tokens a verification",
            level=(least, f"least, overall {least:g}") if least else None,
        ),
        "held_series": held,
        **_more_curves(line),
    }


def _interval(line: Line) -> list[tuple[float, float]]:
    """The interval of every overall accept length."""
    low, high = (line.held_out_curves.get(name, []) for name in ("low", "high"))
    return [(a, b) for (_, a), (_, b) in zip(low, high, strict=False)]


def _more_curves(line: Line) -> dict[str, Any]:
    """Acceptance by place in the draft, and where the time went."""
    places = [
        Series(f"draft token {name.removeprefix('accepted_')}", points, f"s{i % 5}", dots=True)
        for i, (name, points) in enumerate(
            sorted((n, p) for n, p in line.held_out_curves.items() if n.startswith("accepted_"))
        )
    ]
    speed = [Series("tokens/s", points, "s0") for points in (line.speed_curves.get("tokens_per_s"),) if points]
    waiting, memory = (line.speed_curves.get(name) for name in ("waiting_share", "peak_memory_mb"))
    return {
        "places": lines(
            places,
            title="Share of drafted tokens accepted by step, held out",
            x_label="optimizer step",
            y_label="accepted",
            percent=True,
            from_zero=True,
        ),
        "places_series": places,
        "speed": lines(
            speed,
            title="Training speed by step",
            x_label="optimizer step",
            y_label="supervised tokens/s",
            from_zero=True,
        ),
        "waiting": max((share for _, share in waiting), default=0.0) if waiting else None,
        "memory": max((size for _, size in memory), default=0.0) if memory else None,
    }


def _accept_columns(line: Line) -> dict[str, Any]:
    """Accept lengths of held_out.csv by domain: column accept_length is overall, accept_length_<domain> a domain."""
    return {
        name.removeprefix("accept_length").removeprefix("_") or "overall": points
        for name, points in line.held_out_curves.items()
        if name.startswith("accept_length")
    }


def _style(name: str, line: Line) -> str:
    """A domain looks the same in every chart."""
    domains = sorted({s.domain for s in line.prepared.sources}) if line.prepared else []
    return _STYLE.get(name, f"s{1 + domains.index(name) % 4}" if name in domains else "s4")


def _accept(line: Line, params: Params | None) -> dict[str, Any] | None:
    if line.serve is None:
        return None
    least: dict[str, float] = {}
    if params:
        gate = params.gates.deployment
        least = {"overall": gate.min_accept_length, **gate.min_domain_accept_length}
    found: dict[str, AcceptLength] = {"overall": line.serve.served, **dict(sorted(line.serve.served_by_domain.items()))}
    rows = [Interval(n, a.accept_length, a.low, a.high, least.get(n)) for n, a in found.items()]
    apart = line.benchmark.out_of_distribution if line.benchmark else None
    if apart:
        rows.append(Interval("unseen kind", apart.accept_length, apart.low, apart.high))
    series = [
        Series(n, [(float(i + 1), v) for i, v in enumerate(a.by_position)], _style(n, line), dots=True)
        for n, a in found.items()
    ]
    steps = [float(i + 1) for i in range(line.serve.draft_steps)]
    return {
        "by_domain": intervals(rows, title="Accept length by domain", x_label="tokens a verification"),
        "by_position": lines(
            series,
            title="Share of drafted tokens accepted, by position",
            x_label="position in the draft",
            y_label="accepted",
            percent=True,
            from_zero=True,
            steps=steps,
        ),
        "series": series,
        "found": found,
        "apart": apart,
        "positions": len(steps),
        "by_length": sorted(line.serve.served_by_length.items(), key=lambda pair: int(pair[0].split("-")[0])),
    }


def _comparison(line: Line) -> list[dict[str, Any]]:
    if line.serve is None:
        return []
    pairs = {"overall": (line.serve.served, line.serve.simulated)}
    for domain, served in sorted(line.serve.served_by_domain.items()):
        if domain in line.serve.simulated_by_domain:
            pairs[domain] = (served, line.serve.simulated_by_domain[domain])
    return [
        {
            "name": name,
            "served": served.accept_length,
            "simulated": simulated.accept_length,
            "gap": (simulated.accept_length - served.accept_length) / served.accept_length,
            "requests": served.requests,
        }
        for name, (served, simulated) in pairs.items()
    ]


def _median(values: tuple[float, ...]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def best_arms(evidence: BenchmarkEvidence) -> dict[str, dict[int, Any]]:
    """plain, speculative (the draft steps that are best at concurrency 1) and policy, by concurrency."""
    arms: dict[str, dict[int, Any]] = {"plain": {}, "speculative": {}, "policy": {}}
    lowest = min(a.concurrency for a in evidence.arms) if evidence.arms else 0
    drafted = [a for a in evidence.arms if a.name == "speculative" and a.concurrency == lowest]
    steps = max(drafted, key=lambda a: _median(a.tokens_per_s)).draft_steps if drafted else 0
    for arm in evidence.arms:
        if arm.name != "speculative" or arm.draft_steps == steps:
            arms[arm.name][arm.concurrency] = arm
    return {name: by for name, by in arms.items() if by}


def _throughput(evidence: BenchmarkEvidence) -> dict[str, Any] | None:
    arms = best_arms(evidence)
    if not arms:
        return None
    levels = sorted({c for by in arms.values() for c in by})
    series = [
        Series(
            _arm_name(name, by),
            [(float(c), _median(by[c].tokens_per_s)) for c in sorted(by)],
            _STYLE[name],
            bounds=[(min(by[c].tokens_per_s), max(by[c].tokens_per_s)) for c in sorted(by)],
            dots=True,
        )
        for name, by in arms.items()
    ]
    off = evidence.speculation_off_above
    mark = (float(off), f"off above {off}") if off is not None else None
    ratios = {(r.arm, r.draft_steps, r.concurrency): r for r in evidence.ratios}
    rows: list[dict[str, Any]] = []
    for c in levels:
        row: dict[str, Any] = {"concurrency": c, "arms": {}, "ratio": None}
        for name, by in arms.items():
            row["arms"][name] = by.get(c)
        policy = by_policy.get(c) if (by_policy := arms.get("policy")) else None
        row["ratio"] = ratios.get(("policy", policy.draft_steps, c)) if policy else None
        rows.append(row)
    return {
        "chart": lines(
            series,
            title="Tokens per second by requests decoded at once",
            x_label="requests decoded at once",
            y_label="tokens/s, median and range",
            from_zero=True,
            steps=[float(c) for c in levels],
            mark=mark,
        ),
        "series": series,
        "rows": rows,
        "names": list(arms),
        "median": _median,
        "evidence": evidence,
    }


def _arm_name(name: str, by: dict[int, Any]) -> str:
    steps = sorted({a.draft_steps for a in by.values()})
    return f"speculative, {steps[0]} drafted" if name == "speculative" else name


def _policy(line: Line) -> list[dict[str, Any]]:
    if line.policy is None:
        return []
    rows: list[dict[str, Any]] = []
    for span in line.policy.spans():
        named = f"above {span.first - 1}" if span.last is None else f"{span.first} to {span.last}"
        rows.append({"span": str(span.first) if span.last == span.first else named, "level": span.level})
    return rows


def _chain(line: Line) -> list[tuple[str, str, str]]:
    """What is bound to what: thing, digest, what it names."""
    chain: list[tuple[str, str, str]] = []
    if line.prepared:
        chain += [(f"source {s.name}", s.rows_digest, s.licence) for s in line.prepared.sources]
        chain.append(("prepared rows", line.prepared.digest(), "names the sources and the target"))
    if line.capture:
        chain.append(("hidden states", line.capture.digest(), f"{len(line.capture.folders)} folders"))
    if line.merged:
        chain.append(("merged set", line.merged.digest(), "names prepared rows and hidden states"))
    if line.draft:
        chain.append(("draft", line.draft.digest(), "names the merged set and gate-training's report"))
    if line.policy:
        chain.append(("serving policy", line.policy.digest(), "names the draft"))
    return chain


def _percent(value: float, digits: int = 0) -> str:
    return f"{value * 100:.{digits}f}\u202f%"


def _code(words: str) -> Markup:
    """Text with `commands` set as code."""
    parts = words.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(parts))


def _short(value: str) -> str:
    return value.removeprefix("sha256:")[:12]
