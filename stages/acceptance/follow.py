"""A live engine follows a serving policy: with hysteresis, so that a load that flutters around a boundary does not flap.

Switching on again is not free: the draft first takes in every position it has not seen of every running request, in one
pass over them all. So the load must stay on the other side for `hold_steps` decode steps in a row (a switch then costs at
most one such pass in so many), or, with a `band`, be more than so many requests away from what is served as now. A batch
that was not measured is served plainly at once: nothing is known of how much the wait would cost there.
"""

from __future__ import annotations

from dataclasses import dataclass

from stages.contracts.policy import ServingPolicy


@dataclass(frozen=True)
class Switch:
    """Before decode step `step` (counted from 0) the draft length changed, at a running batch of `batch`."""

    step: int
    batch: int
    before: int
    after: int


class Follower:
    """Called once a decode step with the running batch's size; gives the draft steps of that step.

    One follower belongs to one engine: it remembers what is served now. The first step is served by the table.
    """

    def __init__(self, policy: ServingPolicy) -> None:
        self.policy = policy
        self.switches: list[Switch] = []
        self._now: int | None = None
        self._waited = self._step = 0

    def __call__(self, batch: int) -> int:
        if self._now is None:
            self._now = self.policy.steps_for(batch)
        elif self._is_within(batch):
            self._waited = 0
        else:
            self._waited += 1
            if self._waited >= self.policy.hysteresis.hold_steps or not self.policy.is_measured(batch):
                self._switch(batch)
        self._step += 1
        return self._now

    def most(self, concurrency: int) -> int:
        """The longest draft that may be asked for at 1..concurrency requests at once, what is served now included."""
        return max(self._now or 0, *(self.policy.steps_for(batch) for batch in range(1, concurrency + 1)))

    def _is_within(self, batch: int) -> bool:
        """Whether this batch is still to be served as now: by the table, or by the table of one within the band."""
        if not self.policy.is_measured(batch):
            return self._now == 0
        band = self.policy.hysteresis.band
        near = range(max(1, batch - band), batch + band + 1)
        return any(self.policy.steps_for(b) == self._now for b in near if self.policy.is_measured(b))

    def _switch(self, batch: int) -> None:
        before, self._now = self._now or 0, self.policy.steps_for(batch)
        self._waited = 0
        self.switches.append(Switch(self._step, batch, before, self._now))
