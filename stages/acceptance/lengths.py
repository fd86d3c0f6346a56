"""Accept-length arithmetic, for answers simulated and answers served alike.

Convention: accept length = tokens / verifications over whole answers. A verification is one forward pass of the target
over drafted tokens; it emits the accepted ones and one of the target's own (the bonus, counted). The answer's first
token comes from the prefill: it is counted as a token and needs no verification, as in SGLang's completion_tokens and
spec_verify_ct. Plain decoding is 1.0 by definition. What stands behind the answer's end (end of turn, or the cap) is
neither a token nor accepted, though it was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.contracts.evidence import AcceptLength

_RESAMPLES = 1000
_SHORTEST = 32  # prompt tokens of the first bucket
_INTERVAL = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class Answer:
    """One request: tokens of its answer, the first included, and of every verification the drafted tokens kept."""

    tokens: int
    accepted: tuple[int, ...]

    @property
    def verifications(self) -> int:
        return len(self.accepted)


def accept_length(answers: Sequence[Answer], draft_steps: int, seed: int = 0) -> AcceptLength:
    """Accept length over `answers`, with a 95 % interval from a bootstrap over requests.

    Requests are resampled, not verifications: those of one answer resemble each other. No verification at all (answers
    of one token, or none) counts as plain decoding: 1.0.
    """
    tokens = np.array([a.tokens for a in answers], dtype=np.int64)
    verifications = np.array([a.verifications for a in answers], dtype=np.int64)
    accepted = np.array([n for a in answers for n in a.accepted], dtype=np.int64)
    low, high = _interval(tokens, verifications, seed)
    return AcceptLength(
        requests=len(answers),
        tokens=int(tokens.sum()),
        verifications=int(verifications.sum()),
        accept_length=_ratio(float(tokens.sum()), float(verifications.sum())),
        low=low,
        high=high,
        by_position=tuple(float((accepted > i).mean()) if len(accepted) else 0.0 for i in range(draft_steps)),
    )


def by_domain(
    answers: Sequence[Answer], domains: Sequence[str], draft_steps: int, seed: int = 0
) -> dict[str, AcceptLength]:
    """Accept length of every domain there is."""
    return {
        domain: accept_length([a for a, d in zip(answers, domains, strict=True) if d == domain], draft_steps, seed)
        for domain in sorted(set(domains))
    }


def gain(
    before: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]], seed: int = 0
) -> tuple[float, float, float]:
    """Accept length of `now` less that of `before`, with its 95 % interval; both (tokens, verifications) of the same answers.

    The same answers are drawn for both, so that what differs between answers cancels: much narrower than two intervals.
    """
    assert len(before) == len(now), "not the same answers"
    a, b = (np.array(pairs, dtype=np.int64).reshape(-1, 2) for pairs in (before, now))
    if not len(a) or not (a[:, 1].sum() and b[:, 1].sum()):
        return 0.0, 0.0, 0.0
    drawn = np.random.default_rng(seed).integers(0, len(a), (_RESAMPLES, len(a)))
    sums = (a[drawn].sum(axis=1), b[drawn].sum(axis=1))  # [resamples, 2]
    old, new = (np.where(s[:, 1] > 0, s[:, 0] / np.maximum(s[:, 1], 1), 1.0) for s in sums)
    low, high = np.percentile(new - old, _INTERVAL)
    here = _ratio(*map(float, b.sum(axis=0))) - _ratio(*map(float, a.sum(axis=0)))
    return here, float(low), float(high)


def by_length(
    answers: Sequence[Answer], prompt_tokens: Sequence[int], draft_steps: int, seed: int = 0
) -> dict[str, AcceptLength]:
    """Accept length by prompt tokens, in buckets that double: "1-32", "33-64", "65-128", …, those there are.

    A draft that reaches less far than the target, or positions that a long prompt scales otherwise, show here and in no mean.
    """
    upper = [max(_SHORTEST, 1 << (n - 1).bit_length()) for n in prompt_tokens]
    return {
        f"{1 if top == _SHORTEST else top // 2 + 1}-{top}": accept_length(
            [a for a, u in zip(answers, upper, strict=True) if u == top], draft_steps, seed
        )
        for top in sorted(set(upper))
    }


def _ratio(tokens: float, verifications: float) -> float:
    return tokens / verifications if verifications else 1.0


def _interval(tokens: np.ndarray, verifications: np.ndarray, seed: int) -> tuple[float, float]:
    if not verifications.sum():
        return 1.0, 1.0
    drawn = np.random.default_rng(seed).integers(0, len(tokens), (_RESAMPLES, len(tokens)))
    sums = verifications[drawn].sum(axis=1)
    ratios = np.where(sums > 0, tokens[drawn].sum(axis=1) / np.maximum(sums, 1), 1.0)
    low, high = np.percentile(ratios, _INTERVAL)
    return float(low), float(high)
