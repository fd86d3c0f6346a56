"""serve-validate: target and draft in the engine, on held-out prompts.

Four questions. Is the draft fed what it was trained on? Is the output that of plain decoding? How many tokens does a
verification bring, and is that what the simulation on stored rows foretold? Do samples follow the target's distribution?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from stages._serve_both_ways import as_requests, compare_greedy, serve_both_ways, sum_up
from stages._serve_sampling import check_sampling
from stages._served import Served, open_served
from stages.acceptance.lengths import Answer as Counted
from stages.acceptance.lengths import accept_length, by_domain, by_length
from stages.acceptance.prompts import Prompt, held_out_prompts
from stages.acceptance.simulate import replay_rows
from stages.capture.probe import nearest_points
from stages.capture.store import RowStore
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import Refusal, run
from stages.contracts.evidence import (
    SERVE_EVIDENCE,
    ParitySlot,
    RequestRecord,
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


def validate(params: Params, record: DraftRecord, prepared: PreparedManifest) -> ServeEvidence:
    """Serve, compare, count."""
    told, served = params.serve, open_served(params, record)
    prompts = held_out_prompts(prepared, told.prompts_per_source)
    both = serve_both_ways(served, prompts, params)
    drafted = both.drafted
    parity, words = check_parity(served, prompts, drafted, both.fed, record)
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
    greedy = [
        compare_greedy(served.target, [p], [a], [b]) for p, a, b in zip(prompts, both.plain, drafted, strict=True)
    ]
    return ServeEvidence(
        draft_digest=record.digest(),
        engine=served.engine.NAME,
        engine_version=served.version,
        draft_steps=told.draft_steps,
        max_new_tokens=told.max_new_tokens,
        parity=parity,
        parity_words=words,
        greedy=sum_up(greedy),
        greedy_by_domain={
            d: sum_up([g for g, of in zip(greedy, domains, strict=True) if of == d]) for d in sorted(set(domains))
        },
        stops=both.stops,
        sampling=sampling,
        served=accept_length(counted, told.draft_steps),
        served_by_domain=by_domain(counted, domains, told.draft_steps),
        served_by_length=by_length(counted, [len(p.ids) for p in prompts], told.draft_steps),
        simulated=accept_length(replayed, told.draft_steps),
        simulated_by_domain=by_domain(replayed, [domains[i] for i in as_stored], told.draft_steps),
        requests=tuple(record_of(p, counted[i], simulated.get(i)) for i, p in enumerate(prompts)),
    )


def record_of(prompt: Prompt, served: Counted, simulated: Counted | None) -> RequestRecord:
    """One request, as served and as simulated."""
    return RequestRecord(
        prompt_id=prompt.prompt_id,
        source=prompt.source,
        domain=prompt.domain,
        prompt_tokens=len(prompt.ids),
        tokens=served.tokens,
        verifications=served.verifications,
        accepted=served.accepted,
        simulated_verifications=simulated.verifications if simulated else None,
        simulated_accepted=simulated.accepted if simulated else None,
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
