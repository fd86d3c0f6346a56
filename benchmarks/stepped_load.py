"""A load that climbs from 1 request at once to 16 and down again, served plainly, with one draft length throughout, and by
the policy with its hysteresis: does the policy keep up with the better of the others at every level, and are answers those of
plain decoding across its switches? Needs a benchmarked line (`dvc repro benchmark`); changes nothing in it.

    python -m benchmarks.stepped_load

Requests run on across levels, and on the way down those that are too many run to their end. So a level's figure counts the decode
steps in which as many run as it says, from the first of them: the wait of the hysteresis and the pass in which the draft catches
up are in it, the passes of prompts, equal for all, are not. The order of the arms and of the requests turns with each repeat; ratios are paired by repeat.
"off" is the engine that keeps the target's states for a draft it never asks, over one that never had a draft. The trace of every
pass is written to logs/stepped_load.json. Fails when an answer differs, or a whole interval lies below the goal.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from stages._served import packed_linear
from stages.acceptance.follow import Follower
from stages.acceptance.prompts import held_out_prompts, take
from stages.acceptance.sweep import paired_interval, turns
from stages.contracts.draft import DRAFT
from stages.contracts.files import canonical, write_whole
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import load_params
from stages.contracts.policy import POLICY, ServingPolicy
from stages.contracts.progress import progress
from stages.drafts._decode import DraftDecoder
from stages.drafts.eagle3 import read_draft
from stages.engines.in_process import Answer, InProcess, Request, served_points
from stages.targets import load_target, locate_target

STAIRS = (1, 2, 4, 8, 16, 8, 4, 2, 1)  # requests at once
TRACE = Path("logs/stepped_load.json")
_GOAL = 0.95  # of the better of plain and fixed, every level
_TOKENS = 16  # an answer
_LEAST = 7  # requests that a level starts beyond one a place: at 1, the wait of the hysteresis is a small share of eight answers
_PROMPTS = 16  # the shortest held-out ones: more time for decoding
_REPEATS = 4
_OFF_PAIRS = 6


@dataclass(frozen=True)
class Pass:
    """A decode step of `batch` requests, or prompts (batch 0), while `level` (an index; past the last at the end) was asked for."""

    level: int
    batch: int
    draft_steps: int
    tokens: int
    seconds: float


@dataclass
class Stairs:
    """A load in levels, for InProcess.generate: each lasts until its requests have started, in the order they wait in, so that
    every arm serves the same texts at the same level."""

    levels: Sequence[int]
    starts: Sequence[int]
    passes: list[Pass] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ends, self._started, self._level = [*accumulate(self.starts)], 0, 0
        self._last = time.perf_counter()

    def at_once(self, running: int) -> int:
        if self._level == len(self.levels):
            return 0
        return min(self.levels[self._level], running + self._ends[self._level] - self._started)

    def passed(self, batch: int, draft_steps: int, tokens: int) -> None:
        now = time.perf_counter()
        self.passes.append(Pass(self._level, batch, draft_steps, tokens, now - self._last))
        self._last = now
        if not batch:  # prompts, each of which has brought its first token
            self._started += tokens
        while self._level < len(self._ends) and self._started >= self._ends[self._level]:
            self._level += 1

    def speeds(self) -> list[float]:
        """Tokens per second of every level, decode steps at its own batch alone."""
        found: list[float] = []
        for i, level in enumerate(self.levels):
            at = [p for p in self.passes if p.level == i and p.batch == level]
            found.append(sum(p.tokens for p in at) / sum(p.seconds for p in at))
        return found

    def speed(self) -> float:
        """Tokens per second of the whole climb: prompts, and what ran on between levels, included."""
        return sum(p.tokens for p in self.passes) / sum(p.seconds for p in self.passes)

    def switches(self) -> int:
        """How often the draft length changed from one decode step to the next."""
        steps = [p.draft_steps for p in self.passes if p.batch]
        return sum(a != b for a, b in pairwise(steps))


def starts(stairs: Sequence[int]) -> list[int]:
    """Requests that each level starts: one a place, and half as many again, at the least seven."""
    return [level + max(level // 2, _LEAST) for level in stairs]


class Off:
    """Draft steps of a policy that could draft and never does."""

    def __call__(self, batch: int) -> int:
        return 0

    def most(self, concurrency: int) -> int:
        return 1


def climb(
    engine: InProcess, requests: Sequence[Request], draft_steps: Any, stairs: Sequence[int] = STAIRS
) -> tuple[list[Answer], Stairs]:
    """Serve as many of `requests` as the load takes; their answers in order, and the trace."""
    load = Stairs(stairs, starts(stairs))
    answers = engine.generate(requests, concurrency=max(stairs), draft_steps=draft_steps, load=load)
    return answers, load


def open_engines() -> tuple[InProcess, InProcess, list[Request], dict[str, Callable[[], Any]]]:
    """The engine with the draft, one that never had it, the requests, and for each arm how to make its draft steps."""
    params, policy = load_params(), ServingPolicy.read(POLICY)
    torch.set_num_threads(params.target.threads)
    target = load_target(locate_target(params.target.origin), params.target.device, params.target.dtype).pack()
    checkpoint = read_draft(DRAFT)
    points = served_points(checkpoint.layer_ids, target.config.layers)
    draft: Any = DraftDecoder(checkpoint, points=points, embedding=target.embedding, linear=packed_linear)
    held_out = sorted(held_out_prompts(PreparedManifest.read(PREPARED_MANIFEST)), key=lambda p: len(p.ids))[:_PROMPTS]
    prompts = take(sorted(held_out, key=lambda p: p.prompt_id), sum(starts(STAIRS)) + max(STAIRS))
    requests = [Request(p.prompt_id, p.ids, _TOKENS, ignore_eos=True) for p in prompts]
    room = {"slots": max(STAIRS), "positions": max(len(p.ids) for p in prompts) + _TOKENS}
    arms: dict[str, Callable[[], Any]] = {"plain": lambda: 0}
    arms[f"fixed {params.serve.draft_steps}"] = lambda: params.serve.draft_steps
    arms["policy"] = lambda: Follower(policy)
    return InProcess(target, draft, **room), InProcess(target, **room), requests, arms


def off_cost(loaded: InProcess, never_on: InProcess, requests: Sequence[Request]) -> tuple[float, float, float]:
    """Throughput with the draft kept ready and never asked, over that of an engine without one; median, low, high."""
    some = list(requests[: max(STAIRS)])
    speeds: dict[str, list[float]] = {"off": [], "never on": []}
    with progress(2 * _OFF_PAIRS, "off against never on", "turns") as advance:
        for _, side in turns(list(speeds), _OFF_PAIRS):
            engine, told = (loaded, Off()) if side == "off" else (never_on, 0)
            started = time.perf_counter()
            answers = engine.generate(some, concurrency=len(some), draft_steps=told)
            speeds[side].append(sum(len(a.ids) for a in answers) / (time.perf_counter() - started))
            advance(1, side)
    return paired_interval(speeds["off"], speeds["never on"])


def compare(runs: dict[str, list[Stairs]]) -> list[dict[str, Any]]:
    """Of every level: median tokens/s by arm, the better of the others, and the policy over it.

    The better arm is the one with the higher median: the best of each repeat would be the luckiest of several.
    """
    rows: list[dict[str, Any]] = []
    for i, level in enumerate(STAIRS):
        speeds = {arm: [run.speeds()[i] for run in of] for arm, of in runs.items()}
        medians = {arm: statistics.median(s) for arm, s in speeds.items()}
        better = max((arm for arm in speeds if arm != "policy"), key=lambda arm: medians[arm])
        ratio, low, high = paired_interval(speeds["policy"], speeds[better])
        rows.append({"requests": level, "better": better, "ratio": ratio, "low": low, "high": high} | medians)
    return rows


def main() -> None:
    loaded, never_on, requests, arms = open_engines()
    expected = {a.prompt_id: a.ids for a in never_on.generate(requests[:_PROMPTS], concurrency=max(STAIRS))}
    runs: dict[str, list[Stairs]] = {arm: [] for arm in arms}
    differing: dict[str, int] = dict.fromkeys(arms, 0)
    answered: dict[str, int] = dict.fromkeys(arms, 0)
    with progress(len(arms) * _REPEATS, "stepped load", "turns") as advance:
        for repeat, arm in turns(list(arms), _REPEATS):
            first = repeat * _PROMPTS // _REPEATS
            asked = [*requests[first:], *requests[:first]]
            answers, trace = climb(never_on if arm == "plain" else loaded, asked, arms[arm]())
            runs[arm].append(trace)
            answered[arm] += len(answers)
            differing[arm] += sum(a.ids != expected[a.prompt_id] for a in answers)
            advance(1, arm)
    off, off_low, off_high = off_cost(loaded, never_on, requests)
    rows = compare(runs)
    trace = {arm: [[asdict(p) for p in run.passes] for run in of] for arm, of in runs.items()}
    write_whole(TRACE, canonical({"stairs": STAIRS, "tokens_an_answer": _TOKENS, "levels": rows, "passes": trace}))
    names = list(arms)
    print(f"{'requests':>8}  " + "  ".join(f"{n:>8}" for n in names) + "  policy / better (95 %)")
    for row in rows:
        told = "  ".join(f"{row[n]:8.1f}" for n in names)
        print(
            f"{row['requests']:8}  {told}  {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}) of {row['better']}"
        )
    whole = {n: [run.speed() for run in runs[n]] for n in names}
    told = "  ".join(f"{statistics.median(whole[n]):8.1f}" for n in names)
    better = max((n for n in names if n != "policy"), key=lambda n: statistics.median(whole[n]))
    ratio, low, high = paired_interval(whole["policy"], whole[better])
    print(f"   whole  {told}  {ratio:.3f} ({low:.3f} to {high:.3f}) of {better}, prompts included")
    print(
        "answers that differ from plain decoding: " + ", ".join(f"{n} {differing[n]} of {answered[n]}" for n in names)
    )
    print(f"switches of the policy, each repeat: {[run.switches() for run in runs['policy']]}")
    print(f"off over never on: {off:.3f} ({off_low:.3f} to {off_high:.3f})")
    print(f"tokens/s, medians of {_REPEATS} interleaved repeats of {_TOKENS} tokens an answer; the trace: {TRACE}")
    if any(differing.values()):
        sys.exit("speculation changed answers")
    if behind := [row["requests"] for row in rows if row["high"] < _GOAL]:
        sys.exit(f"the policy is behind the better of the others at {behind} requests at once")


if __name__ == "__main__":
    main()
