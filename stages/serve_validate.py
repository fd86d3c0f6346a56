"""serve-validate: target and draft in the engine, on held-out prompts.

Four questions. Is the draft fed what it was trained on? Is the output that of plain decoding? How many tokens does a
verification bring, and is that what the simulation on stored rows foretold? Do samples follow the target's distribution?
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from stages._served import Served, open_served
from stages.acceptance.lengths import Answer as Counted
from stages.acceptance.lengths import accept_length, by_domain
from stages.acceptance.prompts import Prompt, held_out_prompts
from stages.acceptance.simulate import replay_rows
from stages.capture.probe import nearest_points
from stages.capture.store import RowStore
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import Refusal, run
from stages.contracts.evidence import (
    SERVE_EVIDENCE,
    Losslessness,
    ParitySlot,
    RequestRecord,
    SamplingFidelity,
    ServeEvidence,
)
from stages.contracts.files import file_digest
from stages.contracts.manifest import (
    HIDDEN_STATES,
    MERGED,
    MERGED_MANIFEST,
    PREPARED_MANIFEST,
    MergedManifest,
    PreparedManifest,
)
from stages.contracts.params import Params, load_params
from stages.contracts.points import name_points
from stages.contracts.progress import progress
from stages.drafts.eagle3 import PackedBatch, Teacher, look_ahead
from stages.targets import identify_target, locate_target
from stages.targets._decoder import Decoder

NEAR_TIE = 1e-3  # logits; batching changes float32 logits by about 1e-5
SAMPLES = 1024  # draws a prompt: the distance's own noise stays below 0.01
_SAMPLES_AT_ONCE = 128
_CELLS = 4  # most likely tokens told apart, the rest being one cell


def demand_same_line(params: Params, record: DraftRecord, merged: MergedManifest, prepared: PreparedManifest) -> None:
    """Raises Refusal when draft, target and data are not of one line.

    The draft's config.json is left to parity, which finds out by value what it makes the engine do.
    """
    target = identify_target(locate_target(params.target.origin), params.target.name)
    pairs = (
        ("the draft's weights", str(DRAFT), record.weights_digest, file_digest(DRAFT / "model.safetensors"), "train"),
        ("the target's weights", "target.origin", record.target.weights_digest, target.weights_digest, "prepare"),
        ("the target's tokenizer", "target.origin", record.target.tokenizer_digest, target.tokenizer_digest, "prepare"),
        (
            "the target's chat template",
            "target.origin",
            record.target.template_digest,
            target.template_digest,
            "prepare",
        ),
        ("the merged rows", str(MERGED_MANIFEST), record.merged_digest, merged.digest(), "train"),
        ("the prepared rows", str(PREPARED_MANIFEST), merged.prepared_digest, prepared.digest(), "extract"),
    )
    for what, where, expected, got, stage in pairs:
        if expected != got:
            raise Refusal(
                f"This draft belongs to other bytes: {what}",
                where=where,
                expected=f"{expected}, as recorded",
                got=got,
                do=f"run `dvc repro {stage}`",
            )


def as_requests(engine: ModuleType, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Any]:
    """Greedy requests; an answer stored capped is asked no further than it was stored."""
    return [
        engine.Request(
            p.prompt_id, p.ids, min(max_new_tokens, len(p.answer)) if p.finish == "capped" else max_new_tokens
        )
        for p in prompts
    ]


def check_parity(
    served: Served, prompts: Sequence[Prompt], answers: Sequence[Any], fed: dict[str, list[Tensor]], record: DraftRecord
) -> tuple[tuple[ParitySlot, ...], str]:
    """Compare what the engine fed the draft with the target run again at every point; of the rows looked at, the one that
    disagrees most speaks for its slot."""
    ids, slots = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        if parts := fed.get(prompt.prompt_id):
            aux = torch.cat(parts)
            ids.append(torch.tensor([*prompt.ids, *answer.ids])[: len(aux)])
            slots.append(aux.view(len(aux), len(record.points), -1))
    probes = nearest_points(served.target, ids, slots, record.points)
    parity = tuple(
        ParitySlot(
            slot=p.slot,
            claimed_point=p.claimed_point,
            nearest_point=p.nearest_point,
            distance=_finite(p.nearest_distance),
            claimed_distance=_finite(p.claimed_distance),
            next_best_distance=_finite(p.next_best_distance),
            rows=p.rows,
            tokens=p.tokens,
        )
        for p in probes
    )
    nearest = tuple(p.nearest_point for p in parity)
    return parity, name_points(nearest, record.points, served.target.config.layers)


def _finite(distance: float) -> float:
    """Facts hold no infinity; a state with NaN or Inf is as far as can be told."""
    return min(distance, 1e9)


def near_tie(target: Decoder, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two greedy answers part ways where the target's two best logits are as good as equal."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if shared is None:
        return False
    ids = torch.tensor([*prompt, *one[:shared]], device=target.device)
    best = target.logits(target.packed(ids, [len(ids)]).last[-1]).topk(2).values
    return float(best[0] - best[1]) < NEAR_TIE


def compare_greedy(
    target: Decoder, prompts: Sequence[Prompt], plain: Sequence[Any], drafted: Sequence[Any]
) -> Losslessness:
    """Count answers equal to plain decoding's, near ties apart, and name the others."""
    identical, ties, differing = 0, 0, []
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        if one.ids == other.ids:
            identical += 1
        elif near_tie(target, prompt.ids, one.ids, other.ids):
            ties += 1
        else:
            differing.append(prompt.prompt_id)
    return Losslessness(
        requests=len(prompts), identical=identical, near_ties=ties, differing_prompt_ids=tuple(differing)
    )


@torch.inference_mode()
def simulate(served: Served, rows: Sequence[tuple[Prompt, int]], steps: int) -> list[Counted]:
    """Replay stored rows, each cut to as many answer tokens as were asked of the engine.

    The draft is the module as trained and the states are the stored ones: nothing of the engine takes part.
    """
    index = pq.read_table(MERGED / "index.parquet", columns=["row_id", "folder", "row_in_folder"]).to_pylist()
    place = {r["row_id"]: (r["folder"], r["row_in_folder"]) for r in index}
    store, target = RowStore(HIDDEN_STATES), served.target
    draft = served.checkpoint.module(target.embedding).to(target.device).eval()
    target_ids = served.checkpoint.target_ids().to(target.device)
    teacher = Teacher(target.norm, target.head_weight[target_ids], target.config.eps, target_ids, len(target.embedding))
    answers: list[Counted] = []
    with progress(len(rows), "simulate", "rows") as advance:
        for prompt, budget in rows:
            states, ids, mask = store.row(*place[prompt.row_id])
            batch = PackedBatch(
                row_ids=(prompt.row_id,),
                lengths=(len(ids),),
                input_ids=ids.to(target.device).long(),
                loss_mask=mask.to(target.device).bool(),
                aux=states[:, :-1].flatten(1).to(target.device).float(),
                last=states[:, -1].to(target.device).float(),
            )
            ahead = look_ahead(draft, teacher, batch, steps, decay=1.0)
            answers += replay_rows(
                ids.tolist(),
                mask.tolist(),
                batch.lengths,
                [len(prompt.ids)],
                ahead.roots.tolist(),
                ahead.drafted.tolist(),
                budget,
            )
            advance(1)
    return answers


def total_variation(counts: Counter[int], exact: Tensor) -> float:
    """Distance of drawn tokens from an exact distribution [V], over its likeliest tokens and one cell for the rest."""
    drawn = sum(counts.values())
    top = exact.topk(min(_CELLS, len(exact))).indices.tolist()
    pairs = [(counts[t] / drawn, float(exact[t])) for t in top]
    pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
    return sum(abs(a - b) for a, b in pairs) / 2


@torch.inference_mode()
def exact_second(target: Decoder, prompt: Sequence[int], first: Counter[int], temperature: float) -> Tensor:
    """The target's distribution [V] of the second token, averaged over the first tokens that were drawn."""
    tokens = sorted(first)
    cache = target.new_cache(len(tokens), len(prompt) + 2)
    target.packed(torch.tensor(prompt, device=target.device), [len(prompt)], (), cache, [0])
    for slot in range(1, len(tokens)):
        cache.move(0, slot)
    lengths = torch.full((len(tokens),), len(prompt), device=target.device)
    last = target.decode(torch.tensor(tokens, device=target.device)[:, None], lengths, cache).last[:, 0]
    p = torch.softmax(target.logits(last).double() / temperature, -1)
    weights = torch.tensor([first[t] for t in tokens], dtype=p.dtype, device=p.device)
    return (weights / weights.sum()) @ p


def check_sampling(served: Served, prompts: Sequence[Prompt], temperature: float) -> SamplingFidelity:
    """Draw the second token of an answer, the first that a verification decides, speculatively and plainly.

    Each way is compared with the exact distribution after the very first tokens it drew, so that only the second token's
    noise remains: about 0.01 for either, less for their difference.
    """
    positions = max(len(p.ids) for p in prompts) + 2
    distances: dict[int, list[float]] = {0: [], 1: []}
    with progress(2 * SAMPLES * len(prompts), "sampling", "draws") as advance:
        for way, found in distances.items():
            steps = way * served.sampled_steps
            with served.open(_SAMPLES_AT_ONCE, positions, steps) as engine:
                for number, prompt in enumerate(prompts):
                    seeds = range((2 * number + way) * SAMPLES, (2 * number + way + 1) * SAMPLES)
                    requests = [served.engine.Request(str(s), prompt.ids, 2, temperature, s, True) for s in seeds]
                    answers = engine.generate(
                        requests, concurrency=_SAMPLES_AT_ONCE, draft_steps=steps, on_answer=lambda _: advance(1)
                    )
                    exact = exact_second(served.target, prompt.ids, Counter(a.ids[0] for a in answers), temperature)
                    found.append(total_variation(Counter(a.ids[1] for a in answers), exact))
    return SamplingFidelity(
        prompts=len(prompts),
        draws=SAMPLES,
        temperature=temperature,
        distance=sum(distances[1]) / len(prompts),
        distance_plain=sum(distances[0]) / len(prompts),
    )


def serve_both_ways(
    served: Served, prompts: Sequence[Prompt], params: Params
) -> tuple[list[Any], list[Any], dict[str, list[Tensor]]]:
    """Plain answers, drafted answers, and the states fed to the draft for the first serve.parity_rows prompts."""
    told = params.serve
    requests = as_requests(served.engine, prompts, told.max_new_tokens)
    positions = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    watched = {p.prompt_id for p in prompts[: told.parity_rows]}
    fed: dict[str, list[Tensor]] = defaultdict(list)

    def observe(prompt_id: str, first: int, aux: Tensor) -> None:
        fed[prompt_id].append(aux)

    found = []
    for label, steps, look in (("serve plain", 0, None), ("serve drafted", told.draft_steps, observe)):
        with (
            served.open(told.concurrency, positions, steps) as engine,
            progress(len(requests), label, "answers") as advance,
        ):
            found.append(
                engine.generate(
                    requests,
                    concurrency=told.concurrency,
                    draft_steps=steps,
                    observe=look,
                    watch=watched,
                    on_answer=lambda _, advance=advance: advance(1),
                )
            )
    return found[0], found[1], fed


def validate(params: Params, record: DraftRecord, prepared: PreparedManifest) -> ServeEvidence:
    """Serve, compare, count."""
    told, served = params.serve, open_served(params, record)
    prompts = held_out_prompts(prepared, told.prompts_per_source)
    plain, drafted, fed = serve_both_ways(served, prompts, params)
    parity, words = check_parity(served, prompts, drafted, fed, record)
    budgets = [r.max_new_tokens for r in as_requests(served.engine, prompts, told.max_new_tokens)]
    as_stored = [i for i, p in enumerate(prompts) if drafted[i].ids == p.answer[: budgets[i]]]
    replayed = simulate(served, [(prompts[i], budgets[i]) for i in as_stored], told.draft_steps)
    simulated = dict(zip(as_stored, replayed, strict=True))
    counted = [Counted(len(a.ids), a.accepted) for a in drafted]
    domains = [p.domain for p in prompts]
    sampling = None
    if told.sampling_prompts:
        shortest = sorted(prompts, key=lambda p: (len(p.ids), p.prompt_id))[: told.sampling_prompts]
        sampling = check_sampling(served, shortest, told.sampling_temperature)
    return ServeEvidence(
        draft_digest=record.digest(),
        engine=served.engine.NAME,
        engine_version=served.version,
        draft_steps=told.draft_steps,
        max_new_tokens=told.max_new_tokens,
        parity=parity,
        parity_words=words,
        greedy=compare_greedy(served.target, prompts, plain, drafted),
        sampling=sampling,
        served=accept_length(counted, told.draft_steps),
        served_by_domain=by_domain(counted, domains, told.draft_steps),
        simulated=accept_length(replayed, told.draft_steps),
        simulated_by_domain=by_domain(replayed, [domains[i] for i in as_stored], told.draft_steps),
        requests=tuple(
            RequestRecord(
                prompt_id=p.prompt_id,
                source=p.source,
                domain=p.domain,
                prompt_tokens=len(p.ids),
                tokens=counted[i].tokens,
                verifications=counted[i].verifications,
                accepted=counted[i].accepted,
                simulated_verifications=simulated[i].verifications if i in simulated else None,
            )
            for i, p in enumerate(prompts)
        ),
    )


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.target.threads)
    record = DraftRecord.read(DRAFT / DRAFT_RECORD)
    merged, prepared = MergedManifest.read(MERGED_MANIFEST), PreparedManifest.read(PREPARED_MANIFEST)
    demand_same_line(params, record, merged, prepared)
    validate(params, record, prepared).write(SERVE_EVIDENCE)


if __name__ == "__main__":
    run(main)
