"""Held-out prompts answered plainly and with the draft, and what becomes of stop conditions both ways."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stages._served import Served
from stages.acceptance.prompts import Prompt
from stages.acceptance.stops import Ended, Stop, count_stops, stop_at_string, stop_at_token
from stages.contracts.evidence import Losslessness, StoppedAnswers
from stages.contracts.params import Params
from stages.contracts.progress import progress
from stages.targets._decoder import Decoder

NEAR_TIE = 1e-3  # logits; batching changes float32 logits by about 1e-5
_STOPPED = 8  # prompts that are asked again with stop conditions


def as_requests(engine: ModuleType, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Any]:
    """Greedy requests; an answer stored capped is asked no further than it was stored."""
    return [
        engine.Request(
            p.prompt_id, p.ids, min(max_new_tokens, len(p.answer)) if p.finish == "capped" else max_new_tokens
        )
        for p in prompts
    ]


def near_tie(target: Decoder, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two greedy answers part ways where the target's two best logits are as good as equal."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if shared is None:
        return False
    ids = torch.tensor([*prompt, *one[:shared]], device=target.device)
    best = target.logits(target.packed(ids, [len(ids)]).last[-1]).topk(2).values
    return float(best[0] - best[1]) < NEAR_TIE


def sum_up(found: Sequence[Losslessness]) -> Losslessness:
    """Several counts as one."""
    return Losslessness(
        requests=sum(f.requests for f in found),
        identical=sum(f.identical for f in found),
        near_ties=sum(f.near_ties for f in found),
        differing_prompt_ids=tuple(i for f in found for i in f.differing_prompt_ids),
    )


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


@dataclass(frozen=True)
class BothWays:
    """Answers plain and drafted, the states fed to the draft, and what became of stop conditions."""

    plain: list[Any]
    drafted: list[Any]
    fed: dict[str, list[Tensor]]
    stops: tuple[StoppedAnswers, ...]


def serve_both_ways(served: Served, prompts: Sequence[Prompt], params: Params) -> BothWays:
    """All prompts with the draft and without, the first serve.parity_rows of them watched; then the stop conditions that the
    drafted answers suggest, both ways too."""
    told = params.serve
    requests = as_requests(served.engine, prompts, told.max_new_tokens)
    positions = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    watched = {p.prompt_id for p in prompts[: told.parity_rows]}
    fed: dict[str, list[Tensor]] = defaultdict(list)
    stops: list[Stop] = []
    found: dict[int, list[Any]] = {}
    stopped: dict[int, list[Any]] = {}

    def observe(prompt_id: str, first: int, aux: Tensor) -> None:
        fed[prompt_id].append(aux)

    for label, steps, look in (("serve drafted", told.draft_steps, observe), ("serve plain", 0, None)):
        how = {"concurrency": told.concurrency, "draft_steps": steps}
        with (
            served.open(told.concurrency, positions, steps) as engine,
            progress(len(requests), label, "answers") as advance,
        ):
            found[steps] = engine.generate(
                requests, observe=look, watch=watched, on_answer=lambda _, advance=advance: advance(1), **how
            )
            stops = stops or choose_stops(found[steps][:_STOPPED])
            stopped[steps] = engine.generate(stop_requests(requests, stops), **how)
    plain, drafted = found[0], found[told.draft_steps]
    equal = {a.prompt_id for a, b in zip(plain, drafted, strict=True) if a.ids == b.ids}
    kept = [
        i for i, s in enumerate(stops) if s.prompt_id in equal
    ]  # the others part at a near tie, or are told as differing
    ends = [
        [Ended(a.ids, a.text, a.finish, a.accepted) for a in (stopped[steps][i] for i in kept)]
        for steps in (0, told.draft_steps)
    ]
    return BothWays(plain, drafted, fed, count_stops([stops[i] for i in kept], *ends))


def choose_stops(answers: Sequence[Any]) -> list[Stop]:
    """A token of every answer and, from an engine that knows text, a string."""
    tokens = [stop_at_token(a.prompt_id, a.ids, a.accepted) for a in answers]
    strings = [stop_at_string(a.prompt_id, a.text, a.accepted) for a in answers if a.text]
    return [s for s in [*tokens, *strings] if s is not None]


def stop_requests(requests: Sequence[Any], stops: Sequence[Stop]) -> list[Any]:
    """The requests of those prompts again, each with its condition."""
    by_id = {r.prompt_id: r for r in requests}
    return [
        replace(
            by_id[s.prompt_id],
            stop_ids=() if s.token is None else (s.token,),
            stop=(s.string,) if s.string else (),
        )
        for s in stops
    ]
