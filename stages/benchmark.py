"""benchmark: plain against speculative decoding by concurrency; from it the serving policy, and the policy measured too.

All arms answer the same held-out prompts to the same length (end of turn is ignored), turn by turn, after a warm-up that is
not counted. Throughput is output tokens over wall time, prompts included.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from stages import engines
from stages.acceptance.follow import Follower
from stages.acceptance.lengths import Answer as Counted
from stages.acceptance.lengths import accept_length, by_domain
from stages.acceptance.mix import shares
from stages.acceptance.policy import choose_policy, speculation_off_above
from stages.acceptance.prompts import Prompt, held_out_prompts, out_of_distribution_prompts, take
from stages.acceptance.sweep import (
    CONFIDENCE,
    Trial,
    confidence_at_once,
    describe_arm,
    paired_interval,
    ratio_over_plain,
    turns,
)
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError, EngineError, Refusal, run
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    AcceptLength,
    Arm,
    BenchmarkEvidence,
    Ratio,
    ServeEvidence,
    ServingPolicy,
)
from stages.contracts.files import file_digest
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import Params, load_params
from stages.contracts.policy import Hysteresis
from stages.contracts.progress import progress
from stages.contracts.serving import SERVING, write_serving
from stages.drafts._decode import DraftDecoder
from stages.drafts.eagle3 import read_draft
from stages.targets import load_target, locate_target
from stages.targets._decoder import Linear

ArmName = Literal["plain", "speculative", "policy"]
Advance = Callable[..., None]
_WARM_UP_TOKENS = 8
_OFF_PAIRS = 12  # of the comparison that proves that off is off: a difference of a hundredth needs many


@dataclass(frozen=True)
class Way:
    """A way of serving: its arm's name, the draft steps written down for it, and what the engine is told."""

    name: ArmName
    draft_steps: int
    told: int | Callable[[int], int]


class Bench:
    """Target with the draft, and target alone (the engine that never had one), over the same weights."""

    def __init__(self, params: Params, prompts: Sequence[Prompt], others: Sequence[Prompt]) -> None:
        self.told, self.prompts = params.benchmark, prompts
        # Long prompts spend the time on prefill, which speculation does not touch: they are counted, not timed.
        self.timed = [p for p in prompts if len(p.ids) <= self.told.max_prompt_tokens]
        if not self.timed:
            raise DataError(
                "No held-out prompt is short enough to be timed",
                where="params.yaml: benchmark.max_prompt_tokens",
                expected=f"at least {min(len(p.ids) for p in prompts)}, the shortest held-out prompt",
                got=str(self.told.max_prompt_tokens),
                do="raise it, or prepare.held_out_share",
            )
        self.module: ModuleType = engines.load(params.serve.engine)
        if not hasattr(self.module, "Engine"):
            raise EngineError(
                "benchmark measures in this process only",
                where="params.yaml: serve.engine",
                expected="in_process",
                got=params.serve.engine,
                do="benchmark with in_process on this machine, or time the server with sglang.bench_serving",
            )
        target = load_target(locate_target(params.target.origin), params.target.device, params.target.dtype).pack()
        checkpoint = read_draft(DRAFT)
        points = self.module.served_points(checkpoint.layer_ids, target.config.layers)
        draft = DraftDecoder(checkpoint, points=points, embedding=target.embedding, linear=_packed_linear)
        longest = max(len(p.ids) for p in [*prompts, *others])
        room = {"slots": max(self.told.concurrencies), "positions": longest + self.told.max_new_tokens}
        self.loaded = self.module.Engine(target, draft, **room)
        self.never_on = self.module.Engine(target, **room)

    def requests(self, prompts: Sequence[Prompt], max_new_tokens: int, ignore_eos: bool = True) -> list[Any]:
        return [self.module.Request(p.prompt_id, p.ids, max_new_tokens, ignore_eos=ignore_eos) for p in prompts]

    def prompts_at(self, concurrency: int) -> list[Prompt]:
        """The prompts of a repeat: benchmark.requests, rounded up to whole rounds of the concurrency."""
        return take(self.timed, math.ceil(self.told.requests / concurrency) * concurrency)

    def trial(
        self,
        engine: Any,
        concurrency: int,
        told: int | Callable[[int], int],
        tokens: int,
        prompts: Sequence[Prompt] = (),
    ) -> Trial:
        """Serve one repeat: `prompts`, or those of the concurrency."""
        requests = self.requests(prompts or self.prompts_at(concurrency), tokens)
        started = time.perf_counter()
        answers = engine.generate(requests, concurrency=concurrency, draft_steps=told)
        spent = time.perf_counter() - started
        return Trial(
            tokens_per_s=sum(len(a.ids) for a in answers) / spent,
            latencies_ms=tuple(a.latency_ms for a in answers),
            first_tokens_ms=tuple(a.first_token_ms for a in answers),
            answers=tuple(Counted(len(a.ids), a.accepted) for a in answers),
        )

    def measure(self, ways: Sequence[Way], concurrency: int, advance: Advance) -> dict[Way, list[Trial]]:
        """All repeats of all ways at one concurrency, in turn, after a short warm-up of each."""
        trials: dict[Way, list[Trial]] = {way: [] for way in ways}
        for way in ways:
            self.trial(self.loaded, concurrency, way.told, min(_WARM_UP_TOKENS, self.told.max_new_tokens))
        for _, way in turns(ways, self.told.repeats):
            trials[way].append(self.trial(self.loaded, concurrency, way.told, self.told.max_new_tokens))
            advance(1, f"concurrency {concurrency}, {way.name} {way.draft_steps}")
        return trials


def _packed_linear(weight: Tensor) -> Linear:
    linear = Linear(weight.contiguous())
    linear.pack()
    return linear


PLAIN = Way("plain", 0, 0)


def sweep(
    bench: Bench, ways_at: Callable[[int], list[Way]], label: str, confidence: float = CONFIDENCE
) -> tuple[list[Arm], list[Ratio]]:
    """Measure plain decoding and `ways_at` every concurrency; intervals of ratios at `confidence`."""
    arms: list[Arm] = []
    ratios: list[Ratio] = []
    turns_in_all = sum((1 + len(ways_at(c))) * bench.told.repeats for c in bench.told.concurrencies)
    with progress(turns_in_all, label, "turns") as advance:
        for concurrency in bench.told.concurrencies:
            trials = bench.measure([PLAIN, *ways_at(concurrency)], concurrency, advance)
            for way, found in trials.items():
                arms.append(describe_arm(way.name, way.draft_steps, concurrency, found))
                if way is not PLAIN:
                    steps, plain = way.draft_steps, trials[PLAIN]
                    ratios.append(ratio_over_plain(way.name, steps, concurrency, found, plain, confidence))
    return arms, ratios


def off_cost(bench: Bench, steps: int) -> tuple[float, float, float]:
    """Throughput where the policy switches the draft off over that of an engine that never had one; median, low, high.

    The draft is off at this load but not at smaller ones, so the engine keeps the target's states for it: that keeping is
    the cost looked for. Measured at the middle concurrency, in many short pairs.
    """
    concurrency = bench.told.concurrencies[len(bench.told.concurrencies) // 2]
    sides: dict[str, tuple[Any, int | Callable[[int], int]]] = {
        "off": (bench.loaded, lambda batch: 0 if batch >= concurrency else steps),
        "never on": (bench.never_on, 0),
    }
    prompts, tokens = take(bench.timed, concurrency), bench.told.max_new_tokens
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for engine, told in sides.values():
        bench.trial(engine, concurrency, told, min(_WARM_UP_TOKENS, tokens), prompts)
    with progress(2 * _OFF_PAIRS, "off against never on", "turns") as advance:
        for _, side in turns(list(sides), _OFF_PAIRS):
            engine, told = sides[side]
            speeds[side].append(bench.trial(engine, concurrency, told, tokens, prompts).tokens_per_s)
            advance(1, side)
    return paired_interval(speeds["off"], speeds["never on"])


def accept_lengths(
    bench: Bench, prompts: Sequence[Prompt], steps: int, label: str
) -> tuple[AcceptLength | None, dict[str, AcceptLength]]:
    """Accept length of a chain of `steps` over answers that end where they end: overall, and by domain."""
    if not prompts:
        return None, {}
    requests = bench.requests(prompts, bench.told.max_new_tokens, ignore_eos=False)
    with progress(len(requests), label, "answers") as advance:
        answers = bench.loaded.generate(
            requests, concurrency=bench.loaded.slots, draft_steps=steps, on_answer=lambda _: advance(1)
        )
    counted = [Counted(len(a.ids), a.accepted) for a in answers]
    return accept_length(counted, steps), by_domain(counted, [p.domain for p in prompts], steps)


def demand_validated(params: Params, record: DraftRecord) -> None:
    """Raises Refusal when serve-validate speaks of another draft or engine, or the weights here are not the draft's: a
    fault would be timed for nothing."""
    if (found := file_digest(DRAFT / "model.safetensors")) != record.weights_digest:
        raise Refusal(
            "The draft's weights are not those of its record",
            where=str(DRAFT / "model.safetensors"),
            expected=record.weights_digest,
            got=found,
            do="run `dvc repro train`, then `dvc repro serve-validate`",
        )
    evidence = ServeEvidence.read(SERVE_EVIDENCE)
    if (evidence.draft_digest, evidence.engine) != (record.digest(), params.serve.engine):
        raise Refusal(
            "serve-validate looked at something else",
            where=str(SERVE_EVIDENCE),
            expected=f"draft {record.digest()} in {params.serve.engine}",
            got=f"draft {evidence.draft_digest} in {evidence.engine}",
            do="run `dvc repro serve-validate`",
        )


def describe_device(params: Params) -> str:
    """The kind of device, for a policy holds for no other: no host's name."""
    if params.target.device == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu {platform.machine()}, {params.target.threads} threads"


def measure_all(
    params: Params, record: DraftRecord, prepared: PreparedManifest
) -> tuple[BenchmarkEvidence, ServingPolicy]:
    """Sweep, choose the policy, measure the policy, and count what the draft is worth by domain."""
    told = params.benchmark
    prompts, others = (
        held_out_prompts(prepared),
        out_of_distribution_prompts(prepared, told.out_of_distribution_prompts),
    )
    bench = Bench(params, prompts, others)
    about = {"engine": bench.module.NAME, "engine_version": bench.module.version(), "device": describe_device(params)}
    chains = [Way("speculative", k, k) for k in told.draft_steps]
    arms, ratios = sweep(bench, lambda _: chains, "plain and drafted")
    steps = params.serve.draft_steps
    _, domains = accept_lengths(bench, prompts[: 2 * max(told.concurrencies)], steps, "by domain")
    hysteresis = Hysteresis(hold_steps=told.hold_steps, band=told.band)
    mix = {"shares": shares([p.domain for p in bench.timed]), "lengths": domains, "hysteresis": hysteresis}
    policy = choose_policy(ratios, draft_digest=record.digest(), **about, **mix)
    at_once = confidence_at_once(len(told.concurrencies))
    by_policy, policy_ratios = sweep(
        bench, lambda c: [Way("policy", policy.steps_for(c), Follower(policy))], "plain and policy", at_once
    )
    out_of_distribution, _ = accept_lengths(bench, others, steps, "out of distribution")
    off, off_low, off_high = off_cost(bench, steps)
    evidence = BenchmarkEvidence(
        draft_digest=record.digest(),
        max_new_tokens=told.max_new_tokens,
        repeats=told.repeats,
        arms=tuple([*arms, *(a for a in by_policy if a.name == "policy")]),
        ratios=tuple([*ratios, *policy_ratios]),
        off_cost_ratio=off,
        off_cost_low=off_low,
        off_cost_high=off_high,
        accept_length_by_domain=domains,
        out_of_distribution=out_of_distribution,
        speculation_off_above=speculation_off_above(policy),
        policy_digest=policy.digest(),
        **about,
    )
    return evidence, policy


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.target.threads)
    record = DraftRecord.read(DRAFT / DRAFT_RECORD)
    demand_validated(params, record)
    evidence, policy = measure_all(params, record, PreparedManifest.read(PREPARED_MANIFEST))
    policy.write(POLICY)
    write_serving(policy, SERVING)
    evidence.write(BENCHMARK_EVIDENCE)


if __name__ == "__main__":
    run(main)
