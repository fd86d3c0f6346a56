"""Kinds of values in params.yaml, and what every section has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


Whole = Annotated[int, Field(strict=True)]  # neither true nor "3" nor 3.0
Number = Annotated[float, BeforeValidator(_no_bool)]  # 1e-4 too, which YAML takes for text
Share = Annotated[Number, Field(ge=0, le=1)]
Positive = Annotated[Whole, Field(ge=1)]
Seed = Annotated[Whole, Field(ge=0, lt=2**31)]  # what every generator takes


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
