"""How often the watch cries for nothing, and how soon it sees a fall: simulated hours of several kinds of traffic.

    python -m benchmarks.drift

Traffic: accept length 1.8 with 3 drafted tokens; windows scatter as verifications do with a design effect of 4 (those of one
answer are alike) and by 0.02 more; their sizes are log-normal. `thin` has 1,500 verifications an hour instead of 20,000; `daily`
swings by 0.05 over a day, its load by 60 %; `weekly` is 0.04 lower on two days of seven besides; `bursts` have heavy tails (Student's
t, 3 degrees of freedom, 0.03 wide); `wandering` is an AR(1) walk, 0.8 an hour, 0.033 wide, whose mean three days do not tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flows.drifting import sequential
from stages.contracts.params import load_params

Numbers = npt.NDArray[np.float64]
KINDS = ("plain", "thin", "daily", "weekly", "bursts", "wandering")
YEARS, FALLS, REPEATS = 40, (0.1, 0.15, 0.2, 0.4), 60
_LEVEL, _STEPS = 1.8, 3


def traffic(kind: str, hours: int, chance: np.random.Generator) -> tuple[Numbers, Numbers]:
    """Accept length and verifications of each hour, without a fall."""
    t = np.arange(hours)
    size = np.maximum(200, chance.lognormal(math.log(1500 if kind == "thin" else 20000), 0.4, hours))
    mean = np.full(hours, _LEVEL)
    if kind in ("daily", "weekly"):
        day = np.sin(2 * np.pi * t / 24)
        mean, size = mean + 0.05 * day, size * (1 + 0.6 * day)
    if kind == "weekly":
        mean = mean - np.where((t // 24) % 7 >= 5, 0.04, 0.0)
    if kind == "bursts":
        mean = mean + chance.standard_t(3, hours) * 0.03
    if kind == "wandering":
        for i, e in enumerate(chance.normal(0, 0.02, hours)):
            mean[i] = _LEVEL + 0.8 * (mean[i - 1] - _LEVEL if i else 0) + e
    spread = np.sqrt(4 * sequential.verification_variance(_LEVEL, _STEPS) / size + 0.02**2)
    return mean + chance.normal(0, 1, hours) * spread, size


def alarms(a: Numbers, v: Numbers, reference: int, step: Callable[..., sequential.Step]) -> list[int]:
    """Hours after the reference at which the watch cries; the statistic begins anew after each."""
    good = sequential.learn(a[:reference].tolist(), v[:reference].tolist(), _STEPS)
    found, s = [], 0.0
    for hour, (x, n) in enumerate(zip(a[reference:].tolist(), v[reference:].tolist(), strict=True)):
        told = step(s, x, n, good)
        s = 0.0 if told.alarm else told.value
        if told.alarm:
            found.append(hour)
    return found


def main() -> None:
    """A line a kind of traffic."""
    params = load_params(Path("params.yaml")).drift
    between = sequential.HOURS_A_YEAR * 60 / params.window_minutes / params.false_alarms_a_year
    sequential.threshold = lru_cache(sequential.threshold)  # solved once a reference, not once an hour

    def step(s: float, x: float, n: float, good: sequential.Good) -> sequential.Step:
        return sequential.step(s, x, n, good, params.min_fall, between)

    chance, reference = np.random.default_rng(1), params.reference_windows
    print(
        f"asked for: {params.false_alarms_a_year:g} false alarms a year; {YEARS} years, {reference} hours of reference each"
    )
    for kind in KINDS:
        years = [len(alarms(*traffic(kind, reference + 8760, chance), reference, step)) for _ in range(YEARS)]
        words = [
            f"{kind:10} {np.mean(years):5.2f} a year ({np.mean(years) * 7 / 365:.4f} a week), none in {sum(y == 0 for y in years)} years"
        ]
        for fall in FALLS:
            delays: list[float] = []
            for _ in range(REPEATS):
                a, v = traffic(kind, reference + 24 * 60, chance)
                at = reference + 24 * 7 + int(chance.integers(24))
                a[at:] -= fall
                after = [h + reference - at + 1 for h in alarms(a, v, reference, step) if h + reference >= at]
                delays.append(after[0] if after else math.inf)
            words.append(
                f"-{fall:g}: {np.median(delays):.0f} h (90 % within {np.quantile(delays, 0.9, method='higher'):.0f})"
            )
        print("; ".join(words), flush=True)


if __name__ == "__main__":
    main()
