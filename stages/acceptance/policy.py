"""From measured throughput to a serving policy: how many tokens to draft at which batch size, and above which none.

Careful on purpose: speculation is on only where the lower end of its interval is above plain decoding, a batch size that
was not measured goes by the next larger one that was, what is off stays off at every larger batch, and beyond the largest
measured one it is off. A wrong "off" costs the speed-up; a wrong "on" costs every user of a full server.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.contracts.errors import DataError
from stages.contracts.evidence import PolicyLevel, Ratio, ServingPolicy


def choose_levels(ratios: Sequence[Ratio]) -> tuple[PolicyLevel, ...]:
    """A level for each measured concurrency, ascending; ratios are those of the speculative arms.

    A level that is off holds the figures of the best draft length there, so that a reader sees why.

    Raises:
        DataError: no ratio at all.
    """
    measured = sorted({r.concurrency for r in ratios})
    if not measured:
        raise DataError("Nothing was measured", expected="ratios of speculative over plain throughput", got="none")
    levels: list[PolicyLevel] = []
    on, above = True, 0
    for concurrency in measured:
        best = max((r for r in ratios if r.concurrency == concurrency), key=lambda r: (r.low, -r.draft_steps))
        on = on and best.low > 1.0
        steps = best.draft_steps if on else 0
        levels.append(
            PolicyLevel(min_batch=above + 1, draft_steps=steps, ratio=best.ratio, low=best.low, high=best.high)
        )
        above = concurrency
    return tuple(levels)


def choose_policy(
    ratios: Sequence[Ratio], *, draft_digest: str, engine: str, engine_version: str, device: str
) -> ServingPolicy:
    """The policy that these ratios allow, for exactly this draft, engine and kind of device."""
    speculative = [r for r in ratios if r.arm == "speculative"]
    return ServingPolicy(
        draft_digest=draft_digest,
        engine=engine,
        engine_version=engine_version,
        device=device,
        levels=choose_levels(speculative),
        measured_up_to=max(r.concurrency for r in speculative),
    )


def speculation_off_above(policy: ServingPolicy) -> int | None:
    """The largest batch that is served with speculation: 0 when none is, None when all that were measured are."""
    if policy.steps_for(policy.measured_up_to):
        return None
    return max((batch for batch in range(1, policy.measured_up_to) if policy.steps_for(batch)), default=0)
