"""params.yaml: registry and promotion, read by the flows alone: no stage's result depends on them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.contracts.sections.base import Number, Positive, Section, Whole


class Registry(Section):
    """Where releases stand. Credentials never stand here: an S3 store takes them from the environment, as every tool does."""

    uri: Annotated[str, Field(min_length=1)]
    endpoint_url: str | None
    region: str | None
    timeout_s: Annotated[Number, Field(gt=0, le=3600)]
    retries: Annotated[Whole, Field(ge=0, le=20)]
    keep_releases: Positive
    grace_hours: Annotated[Number, Field(gt=0)]

    @model_validator(mode="after")
    def _settings_fit(self) -> Registry:
        if self.uri.startswith("s3:"):
            bucket = self.uri.removeprefix("s3://").partition("/")[0]
            if not self.uri.startswith("s3://") or not bucket:
                raise ValueError(f"`uri` {self.uri!r} names no bucket: s3://bucket/prefix")
        elif "://" in self.uri:
            raise ValueError(f"`uri` {self.uri!r} is neither a folder nor s3://bucket/prefix")
        if self.endpoint_url is not None:
            if not self.endpoint_url.startswith(("http://", "https://")):
                raise ValueError(f"`endpoint_url` {self.endpoint_url!r} does not start with http:// or https://")
            if "@" in self.endpoint_url:
                raise ValueError("`endpoint_url` holds a user: credentials come from the environment (AWS_...)")
        return self


class Promotion(Section):
    """What a promotion demands beyond passing gates, and how a server is made to take the draft and looked at."""

    production_beside: Literal["require", "if_measured", "ignore"]
    restart_command: tuple[str, ...]
    restart_limit_s: Annotated[Number, Field(gt=0, le=86400)]
    server_url: str
    canary_requests: Positive
    canary_max_loss: Annotated[Number, Field(ge=0)]

    @model_validator(mode="after")
    def _settings_fit(self) -> Promotion:
        if self.server_url and not self.server_url.startswith(("http://", "https://")):
            raise ValueError(f"`server_url` {self.server_url!r} does not start with http:// or https://")
        return self
