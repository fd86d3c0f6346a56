"""benchmark: plain against speculative decoding by concurrency and by arrival rate; from it the serving policy, and the policy
measured too."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stages._bench import (
    PLAIN,
    Bench,
    Load,
    Way,
    accept_lengths,
    first_requests,
    off_cost,
    open_loop,
    sweep,
    timed_load,
)
from stages._bench_here import BenchHere
from stages._bench_served import open_servers
from stages.acceptance.follow import Follower
from stages.acceptance.mix import shares
from stages.acceptance.policy import choose_policy, speculation_off_above
from stages.acceptance.prompts import Prompt, held_out_prompts, out_of_distribution_prompts
from stages.acceptance.sweep import confidence_at_once
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import Refusal, run
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    BenchmarkEvidence,
    ServeEvidence,
    ServingPolicy,
)
from stages.contracts.files import file_digest
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import Params, load_params
from stages.contracts.policy import Hysteresis
from stages.contracts.serving import SERVING, write_serving


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


@contextmanager
def open_bench(params: Params, record: DraftRecord, prompts: Sequence[Prompt]) -> Generator[Bench, None, None]:
    """The engine of params.yaml, with room for the longest of `prompts` and its answer."""
    positions = max(len(p.ids) for p in prompts) + params.benchmark.max_new_tokens
    if params.serve.engine == "sglang":
        with open_servers(params, record, positions) as bench:
            yield bench
    else:
        yield BenchHere(params, positions)


def measure_all(
    params: Params, record: DraftRecord, prepared: PreparedManifest
) -> tuple[BenchmarkEvidence, ServingPolicy]:
    """Sweep, choose the policy, measure the policy, and count what the draft is worth by domain."""
    told = params.benchmark
    prompts = held_out_prompts(prepared)
    others = out_of_distribution_prompts(prepared, told.out_of_distribution_prompts)
    load = timed_load(told, prompts)
    with open_bench(params, record, [*prompts, *others]) as bench:
        return _measure(params, record, bench, load, prompts, others)


def _measure(
    params: Params, record: DraftRecord, bench: Bench, load: Load, prompts: Sequence[Prompt], others: Sequence[Prompt]
) -> tuple[BenchmarkEvidence, ServingPolicy]:
    told, steps = params.benchmark, params.serve.draft_steps
    about: dict[str, Any] = {"engine": bench.engine, "engine_version": bench.engine_version, "device": bench.device}
    chains = [Way("speculative", k, k) for k in told.draft_steps]
    first = first_requests(bench, load, [PLAIN, *chains])
    arms, ratios = sweep(bench, load, lambda _: chains, "plain and drafted")
    _, domains = accept_lengths(bench, prompts[: 2 * bench.at_once], steps, told.max_new_tokens, "by domain")
    hysteresis = Hysteresis(hold_steps=told.hold_steps, band=told.band)
    mix = {"shares": shares([p.domain for p in load.timed]), "lengths": domains, "hysteresis": hysteresis}
    policy = choose_policy(ratios, draft_digest=record.digest(), **about, **mix)
    at_once = confidence_at_once(len(told.concurrencies))
    by_policy, policy_ratios = sweep(
        bench, load, lambda c: [Way("policy", policy.steps_for(c), Follower(policy))], "plain and policy", at_once
    )
    arrivals = open_loop(bench, load, [PLAIN, *chains], arms)
    out_of_distribution, _ = accept_lengths(bench, others, steps, told.max_new_tokens, "out of distribution")
    off = off_cost(bench, load, steps) or (None, None, None)
    evidence = BenchmarkEvidence(
        draft_digest=record.digest(),
        max_new_tokens=told.max_new_tokens,
        repeats=told.repeats,
        arms=tuple([*arms, *(a for a in by_policy if a.name == "policy")]),
        ratios=tuple([*ratios, *policy_ratios]),
        off_cost_ratio=off[0],
        off_cost_low=off[1],
        off_cost_high=off[2],
        accept_length_by_domain=domains,
        out_of_distribution=out_of_distribution,
        speculation_off_above=speculation_off_above(policy),
        policy_digest=policy.digest(),
        open_loop=tuple(arrivals),
        first_requests=tuple(first),
        conditions=bench.conditions(),
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
