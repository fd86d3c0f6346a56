"""What benchmark measures, whichever engine serves: sweeps, arrivals at random, first requests, accept lengths, the cost of off.

Every arm answers the same prompts to the same length (end of turn is ignored), turn by turn, after a warm-up that is not counted.
Throughput is output tokens over wall time, prompts included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from stages.acceptance.arrivals import arrival_times
from stages.acceptance.lengths import Answer as Counted
from stages.acceptance.lengths import accept_length, by_domain
from stages.acceptance.prompts import Prompt, take
from stages.acceptance.sweep import (
    CONFIDENCE,
    Trial,
    describe_arm,
    describe_arrivals,
    paired_interval,
    ratio_over_plain,
    turns,
)
from stages.contracts.errors import DataError, EngineError
from stages.contracts.evidence import AcceptLength, Arm, Ratio
from stages.contracts.loads import Conditions, FirstRequest, OpenLoop
from stages.contracts.params import Benchmark
from stages.contracts.progress import progress

ArmName = Literal["plain", "speculative", "policy"]
Advance = Callable[..., None]
WARM_UP_TOKENS = 8
_OFF_PAIRS = 12  # of the comparison that proves that off is off: a difference of a hundredth needs many


@dataclass(frozen=True)
class Way:
    """A way of serving: its arm's name, the draft steps written down for it, and what the engine is told.

    `alone` asks for an engine that never had a draft, where the one with a draft can be told to leave it alone.
    """

    name: ArmName
    draft_steps: int
    told: int | Callable[[int], int]
    alone: bool = False


PLAIN = Way("plain", 0, 0)


class Bench(Protocol):
    """Engines ready to be timed. `switches`: one engine serves every draft length; `opened_here`: its first request is to come."""

    engine: str
    engine_version: str
    device: str
    at_once: int
    switches: bool
    opened_here: bool

    def request(self, prompt: Prompt, max_new_tokens: int, ignore_eos: bool) -> Any:
        """The engine's own kind of request, greedy."""
        ...

    def serve(
        self,
        way: Way,
        requests: Sequence[Any],
        *,
        concurrency: int,
        arrivals: Sequence[float] = (),
        on_answer: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Answer all requests, in their order."""
        ...

    def conditions(self) -> Conditions:
        """What held for every arm so far."""
        ...


@dataclass(frozen=True)
class Load:
    """What is asked of every arm: short enough prompts, timed, by params.yaml: benchmark."""

    told: Benchmark
    timed: tuple[Prompt, ...]

    def at(self, concurrency: int) -> list[Prompt]:
        """The prompts of a repeat: benchmark.requests, rounded up to whole rounds of the concurrency."""
        return take(self.timed, math.ceil(self.told.requests / concurrency) * concurrency)


def timed_load(told: Benchmark, prompts: Sequence[Prompt]) -> Load:
    """Long prompts spend the time on prefill, which speculation does not touch: they are counted, not timed.

    Raises:
        DataError: no prompt is short enough.
    """
    timed = tuple(p for p in prompts if len(p.ids) <= told.max_prompt_tokens)
    if not timed:
        raise DataError(
            "No held-out prompt is short enough to be timed",
            where="params.yaml: benchmark.max_prompt_tokens",
            expected=f"at least {min(len(p.ids) for p in prompts)}, the shortest held-out prompt",
            got=str(told.max_prompt_tokens),
            do="raise it, or prepare.held_out_share",
        )
    return Load(told, timed)


def trial(
    bench: Bench, way: Way, prompts: Sequence[Prompt], concurrency: int, tokens: int, arrivals: Sequence[float] = ()
) -> Trial:
    """Serve one repeat.

    Raises:
        EngineError: an answer of another length than was asked for: arms would do unequal work.
    """
    requests = [bench.request(p, tokens, True) for p in prompts]
    started = time.perf_counter()
    answers = bench.serve(way, requests, concurrency=concurrency, arrivals=arrivals)
    spent = time.perf_counter() - started
    if short := [a.prompt_id for a in answers if len(a.ids) != tokens]:
        raise EngineError(
            "Answers are not as long as was asked for, so arms do unequal work",
            where=f"{way.name} with {way.draft_steps} draft steps, prompts {', '.join(short[:5])}",
            expected=f"{tokens} tokens each, end of turn ignored",
            got=", ".join(str(len(a.ids)) for a in answers if len(a.ids) != tokens)[:80],
            do="the longest request must fit the engine (serve.sglang.context_tokens, max_total_tokens)",
        )
    return Trial(
        tokens_per_s=sum(len(a.ids) for a in answers) / spent,
        latencies_ms=tuple(a.latency_ms for a in answers),
        first_tokens_ms=tuple(a.first_token_ms for a in answers),
        answers=tuple(Counted(len(a.ids), a.accepted) for a in answers),
        late_ms=tuple(a.late_ms for a in answers),
    )


def measure(
    bench: Bench, load: Load, ways: Sequence[Way], concurrency: int, advance: Advance
) -> dict[Way, list[Trial]]:
    """All repeats of all ways at one concurrency, in turn, after a short warm-up of each."""
    told, prompts = load.told, load.at(concurrency)
    trials: dict[Way, list[Trial]] = {way: [] for way in ways}
    for way in ways:
        trial(bench, way, prompts, concurrency, min(WARM_UP_TOKENS, told.max_new_tokens))
    for _, way in turns(ways, told.repeats):
        trials[way].append(trial(bench, way, prompts, concurrency, told.max_new_tokens))
        advance(1, f"concurrency {concurrency}, {way.name} {way.draft_steps}")
    return trials


def sweep(
    bench: Bench, load: Load, ways_at: Callable[[int], list[Way]], label: str, confidence: float = CONFIDENCE
) -> tuple[list[Arm], list[Ratio]]:
    """Measure plain decoding and `ways_at` every concurrency; intervals of ratios at `confidence`."""
    arms: list[Arm] = []
    ratios: list[Ratio] = []
    turns_in_all = sum((1 + len(ways_at(c))) * load.told.repeats for c in load.told.concurrencies)
    with progress(turns_in_all, label, "turns") as advance:
        for concurrency in load.told.concurrencies:
            trials = measure(bench, load, [PLAIN, *ways_at(concurrency)], concurrency, advance)
            for way, found in trials.items():
                arms.append(describe_arm(way.name, way.draft_steps, concurrency, found))
                if way is not PLAIN:
                    steps, plain = way.draft_steps, trials[PLAIN]
                    ratios.append(ratio_over_plain(way.name, steps, concurrency, found, plain, confidence))
    return arms, ratios


def first_requests(bench: Bench, load: Load, ways: Sequence[Way]) -> list[FirstRequest]:
    """The first request that each engine ever gets from us, and the same one again. To be called before anything else; nothing
    is known of engines that others opened."""
    if not bench.opened_here:
        return []
    found: list[FirstRequest] = []
    tokens = load.told.max_new_tokens
    with progress(2 * len(ways), "cold and warm", "requests") as advance:
        for way in ways:
            cold, warm = (trial(bench, way, load.timed[:1], 1, tokens) for _ in range(2))
            advance(2)
            found.append(
                FirstRequest(
                    arm=way.name,  # type: ignore[arg-type]
                    draft_steps=way.draft_steps,
                    cold_first_token_ms=cold.first_tokens_ms[0],
                    cold_whole_ms=cold.latencies_ms[0],
                    warm_first_token_ms=warm.first_tokens_ms[0],
                    warm_whole_ms=warm.latencies_ms[0],
                )
            )
    return found


def open_loop(bench: Bench, load: Load, ways: Sequence[Way], arms: Sequence[Arm]) -> list[OpenLoop]:
    """Every rate of benchmark.arrival_rates: repeats of all ways in turn, each repeat of all ways under equal arrivals."""
    told, found = load.told, list[OpenLoop]()
    prompts, tokens = take(load.timed, told.arrival_requests), told.max_new_tokens
    with progress(len(told.arrival_rates) * len(ways) * told.repeats, "arrivals at random", "turns") as advance:
        for rate in told.arrival_rates:
            trials: dict[Way, list[Trial]] = {way: [] for way in ways}
            for repeat, way in turns(ways, told.repeats):
                due = arrival_times(rate, len(prompts), told.seed, repeat)
                trials[way].append(trial(bench, way, prompts, bench.at_once, tokens, due))
                advance(1, f"{rate:g} requests/s, {way.name} {way.draft_steps}")
            for way, these in trials.items():
                most = max(sorted(a.tokens_per_s)[len(a.tokens_per_s) // 2] for a in arms if _is(a, way)) / tokens
                found.append(describe_arrivals(way.name, way.draft_steps, rate, these, most))
    return found


def _is(arm: Arm, way: Way) -> bool:
    return (arm.name, arm.draft_steps) == (way.name, way.draft_steps)


def off_cost(bench: Bench, load: Load, steps: int) -> tuple[float, float, float] | None:
    """Throughput where the policy switches the draft off over that of an engine that never had one; median, low, high.

    The draft is off at this load but not at smaller ones, so the engine keeps the target's states for it: that keeping is the
    cost looked for. Measured at the middle concurrency, in many short pairs. None where an engine does not switch: then "off"
    is an engine that never had a draft.
    """
    if not bench.switches:
        return None
    told = load.told
    concurrency = told.concurrencies[len(told.concurrencies) // 2]
    off = Way("policy", 0, lambda batch: 0 if batch >= concurrency else steps)
    ways = (off, Way("plain", 0, 0, alone=True))
    prompts, tokens = take(load.timed, concurrency), told.max_new_tokens
    speeds: dict[Way, list[float]] = {way: [] for way in ways}
    for way in ways:
        trial(bench, way, prompts, concurrency, min(WARM_UP_TOKENS, tokens))
    with progress(2 * _OFF_PAIRS, "off against never on", "turns") as advance:
        for _, way in turns(ways, _OFF_PAIRS):
            speeds[way].append(trial(bench, way, prompts, concurrency, tokens).tokens_per_s)
            advance(1, "never on" if way.alone else "off")
    return paired_interval(speeds[ways[0]], speeds[ways[1]])


def accept_lengths(
    bench: Bench, prompts: Sequence[Prompt], steps: int, max_new_tokens: int, label: str
) -> tuple[AcceptLength | None, dict[str, AcceptLength]]:
    """Accept length of a chain of `steps` over answers that end where they end: overall, and by domain."""
    if not prompts:
        return None, {}
    requests = [bench.request(p, max_new_tokens, False) for p in prompts]
    way = Way("speculative", steps, steps)
    with progress(len(requests), label, "answers") as advance:
        answers = bench.serve(way, requests, concurrency=bench.at_once, on_answer=lambda _: advance(1))
    counted = [Counted(len(a.ids), a.accepted) for a in answers]
    return accept_length(counted, steps), by_domain(counted, [p.domain for p in prompts], steps)
