"""The serving policy: draft steps by running batch size, where nothing was measured, and how a live engine follows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.contracts.files import Fact

POLICY = Path("reports/policy.json")


class PolicyLevel(Fact):
    """Draft steps from a running batch of `min_batch` on, until the next level. Ratio over plain decoding and interval are
    those of the measured batch that the level stands on: its largest, or `min_batch` itself."""

    min_batch: int
    draft_steps: int
    ratio: float
    low: float
    high: float


class Hysteresis(Fact):
    """How long, and how far, a load must be on the other side before the engine follows.

    hold_steps: consecutive decode steps, the one that switches included; 1 follows at once.
    band: requests; a batch nearer than this to one that is served as now is still served so.
    """

    hold_steps: int = Field(default=4, ge=1)
    band: int = Field(default=0, ge=0)


class WithoutSwitching(Fact):
    """What fits where the engine that was launched cannot change its draft length.

    kind: serve plainly; or one length at every load; or a plain replica behind a router, which gets what the drafted one
    (of `draft_steps`) does not take: more than `max_batch` requests at once.
    """

    kind: Literal["plain", "one_length", "router"]
    draft_steps: int
    max_batch: int | None
    words: str


@dataclass(frozen=True)
class Span:
    """Running batches `first` to `last` (None: and all above). No level: not measured, and served plainly."""

    first: int
    last: int | None
    level: PolicyLevel | None

    @property
    def draft_steps(self) -> int:
        return self.level.draft_steps if self.level else 0


class ServingPolicy(Fact):
    """reports/policy.json: draft steps by running batch size, 0 = plain decoding.

    `levels` ascend by min_batch; a level holds until the next. Below `measured_from` and beyond `measured_up_to` nothing
    was measured: the engine serves those batches as `not_measured` says.

    shares: of the requests that were timed, by domain (empty: not told). by_domain: the levels for a load of one domain
    alone, estimated from what a verification was measured to cost and the domain's accept length; nothing serves by them
    unless a router keeps the domains apart.
    """

    version: Literal[2] = 2
    draft_digest: str
    engine: str
    engine_version: str
    device: str
    levels: tuple[PolicyLevel, ...]
    measured_from: int = 1
    measured_up_to: int
    not_measured: Literal["plain"] = "plain"
    hysteresis: Hysteresis = Hysteresis()
    shares: dict[str, float] = Field(default_factory=dict)
    by_domain: dict[str, tuple[PolicyLevel, ...]] = Field(default_factory=dict)
    without_switching: WithoutSwitching | None = None

    def is_measured(self, batch: int) -> bool:
        """Whether `batch` lies within what was measured."""
        return self.measured_from <= batch <= self.measured_up_to

    def steps_for(self, batch: int) -> int:
        """Draft steps for a running batch of `batch` requests (at least 1)."""
        steps = 0
        for level in self.levels:
            if batch >= level.min_batch:
                steps = level.draft_steps
        return steps if self.is_measured(batch) else 0

    def spans(self) -> tuple[Span, ...]:
        """Every batch from 1 on, ascending and without gaps: the levels, and what was not measured around them."""
        spans = [Span(1, self.measured_from - 1, None)] if self.measured_from > 1 else []
        for level, after in zip(self.levels, [*self.levels[1:], None], strict=True):
            spans.append(Span(level.min_batch, after.min_batch - 1 if after else self.measured_up_to, level))
        return (*spans, Span(self.measured_up_to + 1, None, None))
