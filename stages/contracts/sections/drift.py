"""params.yaml: drift."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from stages.contracts.sections.base import Number, Positive, Section, Whole


class Drift(Section):
    endpoints: tuple[str, ...]
    window_minutes: Positive
    min_verifications: Positive
    reference_windows: Annotated[Whole, Field(ge=12)]
    min_fall: Annotated[Number, Field(gt=0)]
    false_alarms_a_year: Annotated[Number, Field(gt=0, le=100)]
    quiet_windows: Annotated[Whole, Field(ge=0)]
    timeout_s: Annotated[Number, Field(gt=0, le=600)]

    @field_validator("endpoints")
    @classmethod
    def _are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"`{url}` does not start with http:// or https://")
        if len(set(urls)) < len(urls):
            raise ValueError("an endpoint is named twice, and would be counted twice")
        return urls
