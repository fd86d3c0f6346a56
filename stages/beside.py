"""The new draft beside production's: `python -m stages.beside`, after gate-deployment. Not a stage of the graph: who is production is
no fact of the line, and every promotion would make its result stale; the flow that promotes runs it.

    data/prepared/             the held-out prompts, the same ones for both drafts
    models/draft, reports/     the new draft and its policy
    releases/current.json      names production, whose draft and policy its folder has; `python -m flows.release follow` pulls them
    reports/                   beside_production.json is written
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from stages._bench import WARM_UP_TOKENS, Load, Way, timed_load, trial
from stages._bench_here import BenchHere
from stages._served import read_recorded
from stages.acceptance.beside import Difference, difference, domains_told
from stages.acceptance.follow import Follower
from stages.acceptance.lengths import Answer
from stages.acceptance.prompts import Prompt, held_out_prompts
from stages.acceptance.sweep import confidence_at_once, paired_interval, turns
from stages.contracts.beside import BESIDE, AcceptDifference, BesideProduction, ThroughputRatio
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError, EngineError, Refusal, run
from stages.contracts.files import file_digest
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import Params, load_params
from stages.contracts.policy import POLICY, ServingPolicy
from stages.contracts.progress import progress
from stages.contracts.release import POINTER, RELEASES, current_record
from stages.contracts.repository import demand_repository
from stages.drafts._audit import audit_for_target
from stages.engines import in_process
from stages.targets._decoder import Decoder


class Side(NamedTuple):
    """A draft in an engine of its own, over the target that both share, and the policy that it is served by."""

    name: str
    draft_digest: str
    bench: BenchHere
    policy: ServingPolicy


def production_folder() -> tuple[Path, DraftRecord]:
    """The folder of the release that is production, its draft's bytes checked.

    Raises:
        Refusal: there is none.
        DataError: its draft is not the one that its record names.
    """
    release = current_record()
    if release is None:
        raise Refusal(
            "No release is production, so there is nothing to measure beside",
            where=str(POINTER),
            got="no such file",
            do="the first release needs no comparison: `python -m flows.release promote`",
        )
    folder = RELEASES / release.name
    record = DraftRecord.read(folder / "draft" / DRAFT_RECORD)
    pairs = (
        (DRAFT_RECORD, release.draft_digest, record.digest()),
        ("model.safetensors", record.weights_digest, file_digest(folder / "draft" / "model.safetensors")),
        ("config.json", record.config_digest, file_digest(folder / "draft" / "config.json")),
    )
    for name, expected, got in pairs:
        if expected != got:
            raise DataError(
                "A file of production's draft is not what its record says",
                where=str(folder / "draft" / name),
                expected=expected,
                got=got,
                do="`python -m flows.release follow` brings the release's files again",
            )
    return folder, record


def open_sides(params: Params, prompts: Sequence[Prompt]) -> tuple[Side, Side]:
    """The new draft and production's, ready to be timed over one target.

    Raises:
        EngineError: production's draft does not fit this target.
    """
    positions = max(len(p.ids) for p in prompts) + max(params.serve.max_new_tokens, params.benchmark.max_new_tokens)
    folder, record = production_folder()
    new = BenchHere(params, positions)
    _demand_fits(folder / "draft", new.loaded.target)
    old = BenchHere(params, positions, folder / "draft", new.loaded.target)
    return (
        Side("new", DraftRecord.read(DRAFT / DRAFT_RECORD).digest(), new, ServingPolicy.read(POLICY)),
        Side("production", record.digest(), old, ServingPolicy.read(folder / POLICY.name)),
    )


def _demand_fits(folder: Path, target: Decoder) -> None:
    size = {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
    try:
        audit_for_target(folder, read_recorded(folder), embedding=target.embedding, **size)
    except EngineError as error:
        raise EngineError(
            "Production's draft does not fit this target, so the two cannot be compared",
            where=error.where,
            expected=error.expected,
            got=error.got,
            do="where the target was changed on purpose, set promotion.production_beside to `ignore` for this promotion",
        ) from error


def serve_all(side: Side, prompts: Sequence[Prompt], params: Params) -> list[Answer]:
    """Every prompt answered with chains of serve.draft_steps, to where its answer ends."""
    told = params.serve
    requests = [side.bench.request(p, told.max_new_tokens, False) for p in prompts]
    way = Way("speculative", told.draft_steps, told.draft_steps)
    with progress(len(requests), f"accept length, {side.name}", "answers") as advance:
        answers = side.bench.serve(
            way, requests, concurrency=min(told.concurrency, side.bench.at_once), on_answer=lambda _: advance(1)
        )
    return [Answer(len(a.ids), a.accepted) for a in answers]


def compare_lengths(
    sides: tuple[Side, Side], prompts: Sequence[Prompt], told: Sequence[str], params: Params, confidence: float
) -> dict[str, AcceptDifference]:
    """The paired difference overall and in each domain of `told`."""
    new, old = (serve_all(side, prompts, params) for side in sides)
    found = {"overall": difference(new, old, confidence)}
    for domain in told:
        mine = [i for i, p in enumerate(prompts) if p.domain == domain]
        found[domain] = difference([new[i] for i in mine], [old[i] for i in mine], confidence)
    return {name: _fact(one) for name, one in found.items()}


def _fact(d: Difference) -> AcceptDifference:
    return AcceptDifference(requests=d.requests, new=d.new, production=d.old, low=d.low, high=d.high)


def compare_speeds(sides: tuple[Side, Side], load: Load, confidence: float) -> list[ThroughputRatio]:
    """Tokens/s of both, each following its own policy, turn by turn at every concurrency of the benchmark."""
    told, found = load.told, list[ThroughputRatio]()
    with progress(2 * told.repeats * len(told.concurrencies), "throughput", "turns") as advance:
        for concurrency in told.concurrencies:
            prompts = load.at(concurrency)
            speeds: dict[str, list[float]] = {side.name: [] for side in sides}
            ways = {side.name: Way("policy", 0, Follower(side.policy)) for side in sides}
            for side in sides:
                trial(side.bench, ways[side.name], prompts, concurrency, min(WARM_UP_TOKENS, told.max_new_tokens))
            for _, side in turns(sides, told.repeats):
                done = trial(side.bench, ways[side.name], prompts, concurrency, told.max_new_tokens)
                speeds[side.name].append(done.tokens_per_s)
                advance(1, f"concurrency {concurrency}, {side.name}")
            ratio, low, high = paired_interval(speeds["new"], speeds["production"], confidence)
            found.append(ThroughputRatio(concurrency=concurrency, ratio=ratio, low=low, high=high))
    return found


def compare(params: Params, prompts: Sequence[Prompt]) -> BesideProduction:
    """Both drafts over the same prompts in this process, their intervals wide enough to hold all at once at 95 %.

    Raises:
        DataError: fewer than two prompts.
    """
    if len(prompts) < 2:
        raise DataError(
            "Two drafts cannot be told apart on so few prompts",
            where="params.yaml: serve.prompts_per_source",
            expected="at least 2 held-out prompts",
            got=str(len(prompts)),
            do="raise it, or prepare.held_out_share",
        )
    sides = open_sides(params, prompts)
    told = domains_told([p.domain for p in prompts])
    confidence = confidence_at_once(1 + len(told) + len(params.benchmark.concurrencies))
    lengths = compare_lengths(sides, prompts, told, params, confidence)
    speeds = compare_speeds(sides, timed_load(params.benchmark, prompts), confidence)
    new, old = sides
    return BesideProduction(
        draft_digest=new.draft_digest,
        production_draft_digest=old.draft_digest,
        engine=new.bench.engine,
        engine_version=new.bench.engine_version,
        device=new.bench.device,
        confidence=confidence,
        accept_length=lengths,
        throughput=tuple(speeds),
    )


def main() -> None:
    """Measure, and write what was found; whether it is good enough is the promotion's to say.

    Raises:
        Refusal: nothing is production yet, or another engine serves.
    """
    demand_repository()
    params = load_params()
    if params.serve.engine != in_process.NAME:
        raise Refusal(
            "Two drafts are measured side by side in the engine of this process only",
            where="params.yaml: serve.engine",
            expected=in_process.NAME,
            got=params.serve.engine,
            do="set promotion.production_beside to `if_measured`: gate-deployment's comparison with the release has to do",
        )
    torch.set_num_threads(params.target.threads)
    prompts = held_out_prompts(PreparedManifest.read(PREPARED_MANIFEST), params.serve.prompts_per_source)
    found = compare(params, prompts)
    found.write(BESIDE)
    overall = found.accept_length["overall"]
    print(
        f"{BESIDE}: accept length {overall.new:.3f} against production's {overall.production:.3f}, difference "
        f"{overall.low:+.3f} to {overall.high:+.3f} over {overall.requests} requests"
    )


if __name__ == "__main__":
    run(main)
