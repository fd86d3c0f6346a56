"""A load sweep: arms measured turn by turn, so that a machine that drifts drifts for all of them, and compared in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from stages.acceptance.lengths import Answer
from stages.contracts.evidence import Arm, Ratio
from stages.contracts.loads import Latencies, OpenLoop, Percentiles

ArmT = TypeVar("ArmT")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Trial:
    """One repeat of one arm: output tokens per second of wall time, and of each request its times and its answer; how late it
    was sent, where it was due at a time of its own."""

    tokens_per_s: float
    latencies_ms: tuple[float, ...]
    first_tokens_ms: tuple[float, ...]
    answers: tuple[Answer, ...]
    late_ms: tuple[float, ...] = ()

    @property
    def per_token_ms(self) -> list[float]:
        """Of each request, the mean time between tokens after the first; none of answers of one token."""
        told = zip(self.latencies_ms, self.first_tokens_ms, self.answers, strict=True)
        return [(whole - first) / (a.tokens - 1) for whole, first, a in told if a.tokens > 1]


def turns(arms: Sequence[ArmT], repeats: int) -> Iterator[tuple[int, ArmT]]:
    """(repeat, arm) in the order to measure: every arm once a repeat, each repeat starting with the next arm."""
    for repeat in range(repeats):
        first = repeat % len(arms)
        yield from ((repeat, arm) for arm in [*arms[first:], *arms[:first]])


def confidence_at_once(statements: int) -> float:
    """Confidence of each of several intervals, so that all hold at once at 95 % (Bonferroni): a policy is refused for any
    one of its loads, and five loads at 95 % each would be refused by noise alone in one run of five."""
    return 1 - (1 - CONFIDENCE) / statements


def paired_interval(
    over: Sequence[float], base: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """over / base, paired by repeat: median, and a t interval around the geometric mean.

    Throughput varies by factors, so the interval is taken on logarithms; it is widened, if need be, to hold the median.
    At least two repeats are needed.
    """
    from scipy import stats

    ratios = [o / b for o, b in zip(over, base, strict=True)]
    logs = np.log(ratios)
    half = float(stats.t.ppf((1 + confidence) / 2, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
    median, middle = statistics.median(ratios), float(logs.mean())
    return median, min(median, float(np.exp(middle - half))), max(median, float(np.exp(middle + half)))


def ratio_over_plain(
    arm: str,
    draft_steps: int,
    concurrency: int,
    trials: Sequence[Trial],
    plain: Sequence[Trial],
    confidence: float = CONFIDENCE,
) -> Ratio:
    """The ratio of two arms measured in the same repeats."""
    speeds, base = [t.tokens_per_s for t in trials], [t.tokens_per_s for t in plain]
    ratio, low, high = paired_interval(speeds, base, confidence)
    return Ratio(
        arm=arm,  # type: ignore[arg-type]
        draft_steps=draft_steps,
        concurrency=concurrency,
        ratio=ratio,
        low=low,
        high=high,
        confidence=confidence,
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """50th, 90th and 99th; zeros of nothing."""
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist() if len(values) else (0.0, 0.0, 0.0)
    return Percentiles(p50=p50, p90=p90, p99=p99)


def latencies(trials: Sequence[Trial]) -> Latencies:
    """Percentiles over all requests of all repeats."""
    return Latencies(
        first_token_ms=percentiles([ms for t in trials for ms in t.first_tokens_ms]),
        per_token_ms=percentiles([ms for t in trials for ms in t.per_token_ms]),
        whole_ms=percentiles([ms for t in trials for ms in t.latencies_ms]),
    )


def tokens_a_pass(trials: Sequence[Trial]) -> float:
    """Accept length over all requests of all repeats; 1.0 of answers without a pass of their own."""
    passes = sum(a.verifications for t in trials for a in t.answers)
    return sum(a.tokens for t in trials for a in t.answers) / passes if passes else 1.0


def describe_arm(name: str, draft_steps: int, concurrency: int, trials: Sequence[Trial]) -> Arm:
    """Throughput of each repeat and latency percentiles over all requests of all repeats.

    Accept length counts a plain step as a verification that kept nothing, so for the policy's arm it is the tokens that
    a pass of the target brought; plain decoding is 1.0 by definition.
    """
    whole_ms = [ms for t in trials for ms in t.latencies_ms]
    return Arm(
        name=name,  # type: ignore[arg-type]
        draft_steps=draft_steps,
        concurrency=concurrency,
        tokens_per_s=tuple(t.tokens_per_s for t in trials),
        latency_p50_ms=float(np.percentile(whole_ms, 50)),
        latency_p95_ms=float(np.percentile(whole_ms, 95)),
        first_token_p50_ms=float(np.percentile([ms for t in trials for ms in t.first_tokens_ms], 50)),
        accept_length=tokens_a_pass(trials) if name != "plain" else 1.0,
        latencies=latencies(trials),
    )


def describe_arrivals(
    name: str, draft_steps: int, rate_per_s: float, trials: Sequence[Trial], closed_loop_per_s: float
) -> OpenLoop:
    """One arm under arrivals at `rate_per_s`, beside the requests/s that it completed at its best in the closed loop."""
    return OpenLoop(
        arm=name,  # type: ignore[arg-type]
        draft_steps=draft_steps,
        rate_per_s=rate_per_s,
        requests=sum(len(t.answers) for t in trials),
        tokens_per_s=tuple(t.tokens_per_s for t in trials),
        latencies=latencies(trials),
        accept_length=tokens_a_pass(trials) if name != "plain" else 1.0,
        closed_loop_per_s=closed_loop_per_s,
        overloaded=rate_per_s > closed_loop_per_s,
        late_start_p99_ms=percentiles([ms for t in trials for ms in t.late_ms]).p99,
    )
