"""Requests that arrive at random, as users' do: the moments at which each is sent, whatever else is under way."""

from __future__ import annotations

import numpy as np


def arrival_times(rate_per_s: float, count: int, seed: int, repeat: int) -> tuple[float, ...]:
    """Seconds from the start at which `count` requests arrive: a Poisson process of `rate_per_s`.

    The same for every arm of a repeat, so that arms are compared under the same crowding; another for every repeat. Gaps are
    scaled to have exactly the mean that was asked for: the few gaps of a short run would else offer another load.
    """
    gaps = np.random.default_rng([seed, repeat]).exponential(1.0, count)
    gaps *= count / (rate_per_s * gaps.sum())
    return tuple(np.cumsum(gaps).tolist())
