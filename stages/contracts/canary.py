"""The requests that a server is asked after it took a new draft, and what they came to when the draft was validated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from stages.contracts.files import Fact

CANARY = Path("reports/canary.json")


class CanaryRequest(Fact):
    """A prompt's ids, and tokens and verifications of its greedy answer when it was validated."""

    prompt_id: str
    ids: Annotated[tuple[int, ...], Field(min_length=1)]
    tokens: int
    verifications: int


class Canary(Fact):
    """reports/canary.json: validated requests of one draft, small enough to travel with its release."""

    version: Literal[1] = 1
    draft_digest: str
    engine: str
    engine_version: str
    max_new_tokens: int
    requests: Annotated[tuple[CanaryRequest, ...], Field(min_length=1)]

    @property
    def accept_length(self) -> float:
        """Tokens a verification over all requests."""
        return sum(r.tokens for r in self.requests) / sum(r.verifications for r in self.requests)
