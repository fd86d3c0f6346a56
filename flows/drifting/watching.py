"""From looks at the endpoints to a verdict: the window, the statistic, and what seems to have changed when it is an alarm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flows.drifting import sequential
from flows.drifting.endpoint import Look
from flows.drifting.metrics import Window, increase, window_of
from flows.drifting.state import Judged, Watch
from stages.contracts.params import Drift

Status = Literal["learning", "waiting", "steady", "below the release", "fallen", "not comparable"]
Cause = Literal["engine", "target", "draft", "settings", "traffic", "unexplained"]
_CAUSES: dict[str, Cause] = {
    "engine": "engine",
    "version": "engine",
    "target": "target",
    "target weights": "target",
    "draft": "draft",
    "draft steps": "settings",
}
_ORDER: tuple[Cause, ...] = ("draft", "settings", "target", "engine")
_TRAFFIC_SPREADS = 4.0
_TRAFFIC_BITS = 0.1  # Jensen-Shannon, prompt lengths of the windows since the fall against those of the good ones


@dataclass(frozen=True)
class Expected:
    """What the release showed: overall interval, the worst and best domain, drafted tokens a verification."""

    release: str
    accept_length: float
    low: float
    high: float
    domains: dict[str, float]
    draft_steps: int

    @property
    def least(self) -> float:
        """Below this no mix of the release's domains comes."""
        return min([self.low, *self.domains.values()])


@dataclass(frozen=True)
class Verdict:
    status: Status
    words: str
    accept_length: float | None = None
    normal: float | None = None
    statistic: float = 0.0
    threshold: float = 0.0
    cause: Cause | None = None
    event: bool = False


def take(watch: Watch, looks: Mapping[str, Look]) -> None:
    """Add what was served since the last look, over all endpoints, and note who is another than before."""
    for url, seen in looks.items():
        grown = increase(watch.counters.get(url), seen.reading.counters)
        watch.open.add(window_of(seen.reading, grown))
        watch.counters[url] = dict(seen.reading.counters)
        known = watch.identity.get(url)
        if known is not None:
            for name in sorted({*known, *seen.identity}):
                one, other = known.get(name, "unknown"), seen.identity.get(name, "unknown")
                if one != other and name in seen.identity:
                    watch.changed.append(f"{name}: {one} -> {other}")
        watch.identity[url] = (known or {}) | seen.identity


def judge(watch: Watch, expected: Expected, params: Drift, at: str) -> Verdict:
    """Close the window if it is large enough, and say how it stands."""
    window = watch.open
    if window.verifications < params.min_verifications:
        words = f"{window.verifications:.0f} verifications so far; a window has {params.min_verifications}"
        return Verdict("waiting", words)
    watch.open, changed, watch.changed = Window(), watch.changed, []
    watch.seen += 1
    a = window.accept_length
    if a > expected.draft_steps + 1:
        # more tokens a verification than can be: the engine decoded plainly in between, or drafts more than it was validated for
        words = f"{a:.2f} tokens a verification are more than {expected.draft_steps} drafted tokens allow: speculation was off for a part, or has other settings"
        return Verdict("not comparable", words, a)
    row = Judged(
        at=at,
        accept_length=a,
        verifications=window.verifications,
        requests=window.requests,
        prompt_tokens=window.prompt_tokens,
        lengths=window.lengths,
        statistic=0.0,
        threshold=0.0,
        changed=changed,
    )
    if len(watch.reference) < params.reference_windows:
        return _learn(watch, row, expected, params)
    return _test(watch, row, expected, params)


def _learn(watch: Watch, row: Judged, expected: Expected, params: Drift) -> Verdict:
    watch.reference.append(row)
    watch.windows.append(row)
    done = len(watch.reference)
    mean = _mean(watch.reference)
    if done < params.reference_windows:
        words = f"window {done} of {params.reference_windows} that tell what is normal here; {mean:.3f} so far"
        return Verdict("learning", words, row.accept_length, mean)
    if mean < expected.least - params.min_fall:
        words = (
            f"{mean:.3f} from the first window on, though the release showed {expected.accept_length:.3f} "
            f"({expected.low:.3f} to {expected.high:.3f}) and no domain of it below {expected.least:.3f}: "
            "traffic that is like none of them, or states that this draft was not trained on"
        )
        return Verdict("below the release", words, row.accept_length, mean, cause="unexplained", event=True)
    words = f"normal here is {mean:.3f}; the release showed {expected.low:.3f} to {expected.high:.3f}"
    return Verdict("steady", words, row.accept_length, mean)


def _test(watch: Watch, row: Judged, expected: Expected, params: Drift) -> Verdict:
    good = sequential.learn(
        [w.accept_length for w in watch.reference], [w.verifications for w in watch.reference], expected.draft_steps
    )
    between = sequential.HOURS_A_YEAR * 60 / params.window_minutes / params.false_alarms_a_year
    at = sequential.step(watch.statistic, row.accept_length, row.verifications, good, params.min_fall, between)
    watch.statistic = at.value
    row = row.model_copy(update={"statistic": at.value, "threshold": at.threshold})
    watch.windows.append(row)
    told = (row.accept_length, good.mean, at.value, at.threshold)
    if not at.alarm:
        words = f"{row.accept_length:.3f}, normally {good.mean:.3f}; {at.value:.2f} of {at.threshold:.2f}"
        return Verdict("steady", words, *told)
    since = _since(watch.windows)
    cause, why = cause_of(since, watch.reference)
    quiet = watch.seen < watch.quiet_until
    watch.statistic = 0.0
    if not quiet:
        watch.quiet_until = watch.seen + params.quiet_windows
    words = (
        f"accept length fell to {_mean(since):.3f} over the last {len(since)} windows; normally {good.mean:.3f} here, and the "
        f"release showed {expected.accept_length:.3f} ({expected.low:.3f} to {expected.high:.3f}); {why}"
    )
    return Verdict("fallen", words, *told, cause=cause, event=not quiet)


def _since(windows: Sequence[Judged]) -> list[Judged]:
    """The windows since the statistic last stood at 0: where the fall most likely began (Page)."""
    start = next((i + 1 for i in range(len(windows) - 2, -1, -1) if windows[i].statistic == 0.0), 0)
    return list(windows[start:])


def _mean(windows: Sequence[Judged]) -> float:
    return sum(w.accept_length * w.verifications for w in windows) / sum(w.verifications for w in windows)


def cause_of(since: Sequence[Judged], reference: Sequence[Judged]) -> tuple[Cause, str]:
    """What changed with the fall: what the server says of itself first, then what it was asked."""
    changes = [change for window in since for change in window.changed]
    for cause in _ORDER:
        named = [c for c in changes if _CAUSES.get(c.partition(":")[0]) == cause]
        if named:
            return cause, f"since then another {cause}: {'; '.join(dict.fromkeys(named))}"
    moved = traffic_change(since, reference)
    if moved:
        return "traffic", f"the requests are others: {moved}"
    return (
        "unexplained",
        "engine, target and prompt lengths are as before: other topics, or a target that changed under its name",
    )


def traffic_change(since: Sequence[Judged], reference: Sequence[Judged]) -> str:
    """How prompts are others than before, or nothing. Topics show in no metric; lengths do."""
    known = [w.prompt_length for w in reference if w.requests]
    now = [w.prompt_length for w in since if w.requests]
    if len(known) < 2 or not now:
        return ""
    mean = sum(known) / len(known)
    spread = math.sqrt(sum((p - mean) ** 2 for p in known) / (len(known) - 1))
    length = sum(now) / len(now)
    said: list[str] = []
    if abs(length - mean) > _TRAFFIC_SPREADS * max(spread, 0.02 * mean):
        said.append(f"{length:.0f} tokens a prompt, {mean:.0f} before")
    bits = divergence(_lengths(since), _lengths(reference))
    if bits > _TRAFFIC_BITS:
        said.append(f"prompt lengths {bits:.2f} bits apart (Jensen-Shannon)")
    return " and ".join(said)


def _lengths(windows: Sequence[Judged]) -> dict[float, float]:
    total: dict[float, float] = {}
    for window in windows:
        for bound, count in window.lengths.items():
            total[bound] = total.get(bound, 0.0) + count
    return total


def divergence(one: Mapping[float, float], other: Mapping[float, float]) -> float:
    """Jensen-Shannon divergence of two histograms, 0..1 bit; 0 when one is empty."""
    sums = (sum(one.values()), sum(other.values()))
    if not all(sums):
        return 0.0
    total = 0.0
    for bound in {*one, *other}:
        p, q = one.get(bound, 0.0) / sums[0], other.get(bound, 0.0) / sums[1]
        half = (p + q) / 2
        total += sum(x / 2 * math.log2(x / half) for x in (p, q) if x > 0)
    return total
