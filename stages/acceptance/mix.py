"""A sweep measured on one mix of domains, read for another mix.

Speculation's gain is tokens a verification over what a verification costs in plain passes. The cost depends on batch and
draft length and not on what is written, so it is measured once; the tokens are the domain's accept length. Batch and draft
length are never changed here: a cell that was not measured stays without a figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stages.contracts.errors import DataError
from stages.contracts.evidence import AcceptLength, Ratio


def shares(domains: Sequence[str]) -> dict[str, float]:
    """Share of each domain among `domains`, one entry a request; requests of equal length make equal shares of the tokens."""
    return {domain: domains.count(domain) / len(domains) for domain in sorted(set(domains))}


def ratios_for(
    ratios: Sequence[Ratio],
    lengths: Mapping[str, AcceptLength],
    measured: Mapping[str, float],
    wanted: Mapping[str, float],
) -> tuple[Ratio, ...]:
    """Ratios over plain decoding that a load of the mix `wanted` would see.

    Args:
        lengths: accept length by domain; chains shorter than those counted follow from its by_position. A ratio of a
            longer chain is left out.
        measured, wanted: share of the tokens by domain; they need not sum to 1.

    Returns:
        Ratios; their intervals join those of the throughput and of the accept lengths, which are independent (in quadrature,
        of logarithms).

    Raises:
        DataError: a domain with a share has no accept length.
    """
    if missing := sorted({d for d, share in [*measured.items(), *wanted.items()] if share > 0} - lengths.keys()):
        raise DataError(
            "A domain of the mix has no accept length",
            where=missing[0],
            expected=f"one of {sorted(lengths)}",
            got=f"a share for {missing}",
            do="count it (benchmark: accept_length_by_domain), or leave it out of the mix",
        )
    found: list[Ratio] = []
    for r in ratios:
        if any(len(length.by_position) < r.draft_steps for length in lengths.values()):
            continue
        here = _of_mix(lengths, measured, r.draft_steps)
        factor, low, high = (_of_mix(lengths, wanted, r.draft_steps, end) / here for end in ("", "low", "high"))
        down = math.hypot(math.log(r.ratio / r.low), math.log(factor / low))
        up = math.hypot(math.log(r.high / r.ratio), math.log(high / factor))
        ratio = r.ratio * factor
        found.append(r.model_copy(update={"ratio": ratio, "low": ratio / math.exp(down), "high": ratio * math.exp(up)}))
    return tuple(found)


def _of_mix(lengths: Mapping[str, AcceptLength], shares: Mapping[str, float], steps: int, end: str = "") -> float:
    """Tokens a verification of a mix by tokens: a harmonic mean, for it is verifications that add up."""
    total = sum(shares.values())
    return total / sum(share / _of_domain(lengths[d], steps, end) for d, share in shares.items() if share > 0)


def _of_domain(length: AcceptLength, steps: int, end: str) -> float:
    """Tokens a verification of a chain of `steps`: the bonus token, and each drafted one by its share of verifications.

    `end` of the interval scales what speculation adds, as the whole chain's does."""
    added = sum(length.by_position[:steps])
    if end and length.accept_length > 1:
        added *= (getattr(length, end) - 1) / (length.accept_length - 1)
    return 1 + max(0.0, added)
