"""From measured throughput to a serving policy: how many tokens to draft at which batch size, and where none.

Careful on purpose; a wrong "off" costs the speed-up, a wrong "on" costs every user of a full server:

- a draft length counts by the lower end of its interval, and none that is not above plain decoding there is used;
- lengths within half a hundredth of the best are a tie: the shortest is taken, which loses less when prompts are harder;
- a batch between two measured ones goes by the shorter draft of the two, off if one of them is off;
- past a batch where it is off, speculation is on again only if two measured batches in a row say so: one is a lucky repeat
  (mixture-of-experts targets really do gain more at middle loads than at small ones);
- outside what was measured nothing is known, and the policy says so: plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stages.acceptance.mix import ratios_for
from stages.contracts.errors import DataError
from stages.contracts.evidence import AcceptLength, Ratio
from stages.contracts.policy import Hysteresis, PolicyLevel, ServingPolicy, WithoutSwitching

_TIE = 0.005  # of throughput: less than any repeat here agrees with the next
_LOSS = 0.05  # of plain throughput: the most that a single length for every load may cost, the policy's own bound


def choose_levels(ratios: Sequence[Ratio]) -> tuple[PolicyLevel, ...]:
    """A level for each measured concurrency, ascending; ratios are those of the speculative arms.

    A draft length that was not measured at a concurrency is not used there. A level that is off holds the figures of the
    best draft length there, so that a reader sees why.

    Raises:
        DataError: no ratio at all, or two of one cell.
    """
    cells = _by_concurrency(ratios)
    best = {concurrency: _best(row) for concurrency, row in cells.items()}
    steps = _steps({concurrency: r.draft_steps if r.low > 1.0 else 0 for concurrency, r in best.items()})
    levels: list[PolicyLevel] = []
    below = 0
    for concurrency, r in best.items():
        # On the way up to a longer draft, what lies between keeps the shorter one.
        rises = not levels or steps[concurrency] > levels[-1].draft_steps
        first = concurrency if rises else below + 1
        levels.append(
            PolicyLevel(min_batch=first, draft_steps=steps[concurrency], ratio=r.ratio, low=r.low, high=r.high)
        )
        below = concurrency
    return tuple(levels)


def _by_concurrency(ratios: Sequence[Ratio]) -> dict[int, list[Ratio]]:
    if not ratios:
        raise DataError("Nothing was measured", expected="ratios of speculative over plain throughput", got="none")
    cells = [(r.concurrency, r.draft_steps) for r in ratios]
    if doubled := sorted({c for c in cells if cells.count(c) > 1}):
        raise DataError(
            "A sweep has two figures for one cell",
            expected="one ratio for each concurrency and draft length",
            got=f"concurrency {doubled[0][0]}, {doubled[0][1]} draft steps, {cells.count(doubled[0])} times",
            do="give the repeats of a cell to one interval",
        )
    if any(steps < 1 for _, steps in cells):
        raise DataError("Plain decoding is what ratios are over", expected="draft steps of 1 or more", got="0")
    return {c: [r for r in ratios if r.concurrency == c] for c in sorted({c for c, _ in cells})}


def _best(row: Sequence[Ratio]) -> Ratio:
    """The shortest draft whose lower end is within a tie of the highest; one that a tie would switch off gives way."""
    highest = max(r.low for r in row)
    tied = [r for r in row if r.low >= highest - _TIE and (r.low > 1.0) == (highest > 1.0)]
    return min(tied, key=lambda r: r.draft_steps)


def _steps(proven: Mapping[int, int]) -> dict[int, int]:
    """Draft steps by concurrency, from those that are proven there on their own (0: none)."""
    steps: dict[int, int] = {}
    measured, before = list(proven), 0
    seen_off = False
    for i, concurrency in enumerate(measured):
        alone = proven[concurrency]
        lone = seen_off and not before and not (i + 1 < len(measured) and proven[measured[i + 1]])
        before = steps[concurrency] = 0 if lone else alone
        seen_off = seen_off or not before
    return steps


def choose_policy(
    ratios: Sequence[Ratio],
    *,
    draft_digest: str,
    engine: str,
    engine_version: str,
    device: str,
    hysteresis: Hysteresis | None = None,
    shares: Mapping[str, float] | None = None,
    lengths: Mapping[str, AcceptLength] | None = None,
) -> ServingPolicy:
    """The policy that these ratios allow, for exactly this draft, engine and kind of device.

    Args:
        shares: of the requests that were timed, by domain.
        lengths: accept length by domain, of chains at least as long as those timed: with it the policy says what a load
            of one domain alone would be served with.
    """
    speculative = [r for r in ratios if r.arm == "speculative"]
    levels = choose_levels(speculative)
    measured = [r.concurrency for r in speculative]
    mix = dict(shares or {})
    known = dict(lengths or {}) if mix else {}
    alone = {d: ratios_for(speculative, known, mix, {d: 1.0}) for d in sorted(mix) if mix.keys() <= known.keys()}
    policy = ServingPolicy(
        draft_digest=draft_digest,
        engine=engine,
        engine_version=engine_version,
        device=device,
        levels=levels,
        measured_from=min(measured),
        measured_up_to=max(measured),
        hysteresis=hysteresis or Hysteresis(),
        shares=mix,
        by_domain={domain: choose_levels(found) for domain, found in alone.items() if found},
    )
    return policy.model_copy(update={"without_switching": without_switching(speculative, policy)})


def speculation_off_above(policy: ServingPolicy) -> int | None:
    """The largest batch that is served with speculation: 0 when none is, None when all that were measured are."""
    batches = range(policy.measured_from, policy.measured_up_to + 1)
    on = [batch for batch in batches if policy.steps_for(batch)]
    return None if len(on) == len(batches) else max(on, default=0)


def without_switching(ratios: Sequence[Ratio], policy: ServingPolicy) -> WithoutSwitching:
    """What to do with an engine that drafts as it was launched: the least machinery that still costs no user much."""
    cells = _by_concurrency(ratios)
    off_above = speculation_off_above(policy)
    if off_above == 0:
        return WithoutSwitching(
            kind="plain", draft_steps=0, max_batch=None, words="Serve without the draft: it pays at no load measured."
        )
    safe = [
        steps
        for steps in sorted({r.draft_steps for r in ratios})
        if all(any(r.draft_steps == steps and r.low >= 1 - _LOSS for r in row) for row in cells.values())
    ]
    top = policy.measured_up_to
    if safe:
        gain = {k: sum(r.low for r in ratios if r.draft_steps == k) for k in safe}
        steps = min(safe, key=lambda k: (-gain[k], k))
        words = (
            f"Launch with {steps} draft step{'s' if steps > 1 else ''} for every load: nowhere measured does that lose more than "
            f"{_LOSS:.0%} of plain decoding. Take at most {top} requests at once; beyond that nothing was measured."
        )
        return WithoutSwitching(kind="one_length", draft_steps=steps, max_batch=top, words=words)
    return _router(cells, policy)


def _router(cells: Mapping[int, Sequence[Ratio]], policy: ServingPolicy) -> WithoutSwitching:
    """Two replicas: the drafted one takes what lies below the first batch that its length does not pay at."""
    best: tuple[float, int, int] = (0.0, 0, 0)
    for steps in sorted({r.draft_steps for row in cells.values() for r in row}, reverse=True):
        taken, gain = 0, 0.0
        for concurrency, row in cells.items():
            found = next((r.low for r in row if r.draft_steps == steps), 0.0)
            if found <= 1.0 or not policy.steps_for(concurrency):
                break
            taken, gain = concurrency, gain + found - 1.0
        best = max(best, (gain, taken, steps))
    _, taken, steps = best
    if not taken:  # it pays at middle loads alone: no bound from above sends the small ones elsewhere
        words = "Serve without the draft: a router sends by an upper bound, and the smallest load measured is served plainly."
        return WithoutSwitching(kind="plain", draft_steps=0, max_batch=None, words=words)
    words = (
        f"Put a plain replica beside one with {steps} draft step{'s' if steps > 1 else ''} and a router before both: the drafted "
        f"one takes at most {taken} request{'s' if taken > 1 else ''} at once (max_running_requests), the plain one the rest."
    )
    return WithoutSwitching(kind="router", draft_steps=steps, max_batch=taken, words=words)
