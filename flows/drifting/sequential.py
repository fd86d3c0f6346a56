"""A one-sided CUSUM over windows: quiet for a stated time on noise, quick when accept length falls.

Page (1954), "Continuous inspection schemes". With x the accept length of a window, m its mean and s its spread in windows known
to be good, S rises by (m - x)/s - k and never falls below 0; S > h is an alarm. k is half of the smallest fall worth acting on.

Windows are not independent draws: traffic has days. s is their long-run spread, from the autocovariances of half a day (Newey
and West, 1987) or as an AR(1) process has it, whichever is wider, so that a slow swing counts as the little news that it is;
and k is raised by the error of m itself, which a few days of windows leave. h makes the mean time between false alarms what was
asked for: (exp(2kb) - 2kb - 1) / 2k^2 with b = h + 1.166 (Siegmund, "Sequential Analysis", 1985). No window may raise S by half of
h, so that from nothing an alarm takes three: a real fall is still there in the third, a burst of odd traffic is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_OVERSHOOT = 1.166
_LEAST_K = 0.25  # below, a CUSUM waits for so small a shift that no threshold is both quiet and quick
_MOST_CORRELATED = 0.9
_RISE_MOST = 0.45  # of h, by one window
_LAGS = 12  # windows
HOURS_A_YEAR = 8760.0


@dataclass(frozen=True)
class Good:
    """Windows known to be good: mean, spread of one, spread a window of many in a row, typical size, how many."""

    mean: float
    spread: float
    long_run: float
    verifications: float
    windows: int

    def spread_of(self, verifications: float) -> float:
        """Long-run spread, widened for a window smaller than usual."""
        return self.long_run * math.sqrt(max(1.0, self.verifications / verifications))


def learn(accept_lengths: Sequence[float], verifications: Sequence[float], draft_steps: int) -> Good:
    """Good windows in numbers. A few windows may agree by chance, so the spread is at least that of independent
    verifications of their accept length, with 1 to 1 + draft_steps tokens each."""
    count = len(accept_lengths)
    size = sum(verifications) / count
    mean = sum(a * v for a, v in zip(accept_lengths, verifications, strict=True)) / (size * count)
    off = [a - mean for a in accept_lengths]
    square = sum(d * d for d in off) / max(1, count - 1)
    least = verification_variance(mean, draft_steps) / size
    long_run = max(_newey_west(off), square * _swing(off), least)
    return Good(mean, math.sqrt(max(square, least)), math.sqrt(long_run), size, count)


def _lagged(off: Sequence[float], lag: int) -> float:
    return sum(a * b for a, b in zip(off, off[lag:], strict=False)) / len(off)


def _newey_west(off: Sequence[float]) -> float:
    lags = min(_LAGS, len(off) // 3)
    weighed = (2 * (1 - lag / (lags + 1)) * _lagged(off, lag) for lag in range(1, lags + 1))
    return _lagged(off, 0) + sum(weighed)


def _swing(off: Sequence[float]) -> float:
    """(1 + r)/(1 - r) of an AR(1) process, whose r a few windows tell too low, by about (1 + 4r)/n (Marriott and Pope, 1954)."""
    square = _lagged(off, 0)
    told = _lagged(off, 1) / square if square > 0 else 0.0
    r = min(_MOST_CORRELATED, max(0.0, told + (1 + 4 * told) / len(off)))
    return (1 + r) / (1 - r)


def verification_variance(accept_length: float, draft_steps: int) -> float:
    """Variance of the tokens of one verification when each drafted token is accepted with one chance."""
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        if sum(chance**i for i in range(draft_steps + 1)) < accept_length:
            low = chance
        else:
            high = chance
    survive = [low**i for i in range(1, draft_steps + 1)]  # P(tokens > i)
    mean = 1 + sum(survive)
    second = 1 + sum((2 * i + 1) * s for i, s in enumerate(survive, start=1))
    return max(1e-3, second - mean * mean)


def slack(good: Good, min_fall: float) -> float:
    """k: half of the smallest fall worth acting on, in long-run spreads."""
    return max(_LEAST_K, min_fall / 2 / good.long_run)


def threshold(k: float, windows_between: float) -> float:
    """h, for `windows_between` windows from one false alarm to the next on average."""
    low, high = 0.0, 200.0
    for _ in range(80):
        middle = (low + high) / 2
        rise = 2 * k * (middle + _OVERSHOOT)
        if rise < 700 and (math.exp(rise) - rise - 1) / (2 * k * k) < windows_between:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Step:
    """The statistic after a window, and what it has to exceed."""

    value: float
    threshold: float

    @property
    def alarm(self) -> bool:
        return self.value > self.threshold


def step(
    before: float, accept_length: float, verifications: float, good: Good, min_fall: float, windows_between: float
) -> Step:
    """One window further."""
    k = slack(good, min_fall)
    h = threshold(k, windows_between)
    error = 1 / math.sqrt(good.windows)  # of the mean: costs the smallest falls, and buys the promised quiet
    rise = (good.mean - accept_length) / good.spread_of(verifications) - k - error
    return Step(max(0.0, before + min(rise, _RISE_MOST * h)), h)
