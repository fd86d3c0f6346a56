"""Do samples follow the target's own distribution? Drawn with the draft and without, against the exact one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from stages._served import Served
from stages.acceptance.prompts import Prompt
from stages.contracts.evidence import SamplingFidelity
from stages.contracts.progress import progress
from stages.targets._decoder import Decoder

SAMPLES = 1024  # draws a prompt: the distance's own noise stays below 0.01
_SAMPLES_AT_ONCE = 128
_CELLS = 4  # most likely tokens told apart, the rest being one cell


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
