"""The new draft beside the one in production, measured in one run on the same requests: what a promotion may stand on.

A figure remembered from another week is of other requests, another machine's mood and maybe another engine; only a difference
taken in one run, with its interval, tells two drafts apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from stages.contracts.files import Fact

BESIDE = Path("reports/beside_production.json")
Confidence = Annotated[float, Field(gt=0, lt=1)]


class AcceptDifference(Fact):
    """Accept length of the new draft and of production's over the same requests, tokens a verification; `low` and `high`
    bound the difference new - production, paired by request."""

    requests: int
    new: float
    production: float
    low: float
    high: float


class ThroughputRatio(Fact):
    """Tokens/s of the new draft under its policy over production's under its own, paired by repeat: median and interval."""

    concurrency: int
    ratio: float
    low: float
    high: float


class BesideProduction(Fact):
    """reports/beside_production.json. accept_length: `overall`, and by domain. It is no evidence of gate-deployment: the
    promotion reads it, for it alone knows which release is production."""

    version: Literal[1] = 1
    draft_digest: str
    production_draft_digest: str
    engine: str
    engine_version: str
    device: str
    confidence: Confidence = 0.95
    accept_length: dict[str, AcceptDifference]
    throughput: tuple[ThroughputRatio, ...]
