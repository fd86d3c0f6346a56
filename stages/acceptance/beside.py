"""Two drafts over the same requests: the difference of their accept lengths, paired by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.acceptance.lengths import Answer

FEWEST = 5  # requests of a domain that is told by itself


@dataclass(frozen=True)
class Difference:
    """Accept lengths, tokens a verification, and the interval of new - old."""

    requests: int
    new: float
    old: float
    low: float
    high: float


def difference(new: Sequence[Answer], old: Sequence[Answer], confidence: float) -> Difference:
    """Accept length of `new` less that of `old`, answers to the same requests in the same order; at least two of them.

    A t interval over requests of the linearised difference of two ratios, what one request adds to it:

        d_r = (tokens_r - new · passes_r) / mean passes  -  the same of old        (its sum is zero)

    What a request does to both drafts cancels. Unlike a bootstrap it stays honest with few requests and needs no resamples
    for an interval as wide as several statements at once ask for.
    """
    from scipy import stats

    assert len(new) == len(old) >= 2, "not the same answers"
    (here, by_request), (there, by_request_there) = _linearised(new), _linearised(old)
    d = by_request - by_request_there
    half = float(stats.t.ppf((1 + confidence) / 2, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d)))
    return Difference(len(d), here, there, here - there - half, here - there + half)


def _linearised(answers: Sequence[Answer]) -> tuple[float, np.ndarray]:
    """Tokens a verification, and [requests] what each adds to its error."""
    tokens = np.array([a.tokens for a in answers], dtype=np.float64)
    passes = np.array([a.verifications for a in answers], dtype=np.float64)
    if not passes.sum():
        return 1.0, np.zeros(len(answers))
    ratio = float(tokens.sum() / passes.sum())
    return ratio, (tokens - ratio * passes) / passes.mean()


def domains_told(domains: Sequence[str]) -> list[str]:
    """The domains with requests enough for an interval of their own."""
    return [d for d in sorted(set(domains)) if domains.count(d) >= FEWEST]
