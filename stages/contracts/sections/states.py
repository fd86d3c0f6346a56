"""params.yaml: capture and merge."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.contracts.sections.base import Positive, Section, Whole


class Capture(Section):
    points: Annotated[tuple[Whole, ...], Field(min_length=3, max_length=3)]
    rows_per_folder: Positive
    tokens_per_batch: Positive
    engine: Literal["in_process", "sglang"]
    store_tokens: Literal["all", "to_last_supervised"]
    store_last: Literal["all", "before_supervised"]
    store_aux: Literal["bfloat16", "float8_e4m3"]
    ray: str | None
    adopt: str | None
    adopt_layer_ids: Annotated[tuple[Whole, ...], Field(min_length=1)] | None
    adopt_last_state: Literal["before_final_norm", "after_final_norm"] | None
    adopt_lacking: Literal["refuse", "extract"]

    @model_validator(mode="after")
    def _about_a_store(self) -> Capture:
        told = [n for n in ("adopt_layer_ids", "adopt_last_state") if getattr(self, n) is not None]
        if self.adopt is None and told:
            raise ValueError(f"{' and '.join(told)} say something of a store, and adopt names none")
        return self

    @model_validator(mode="after")
    def _over_ray(self) -> Capture:
        if self.ray is not None and (self.engine != "in_process" or self.adopt is not None):
            raise ValueError("ray spreads the target's own passes: engine in_process, and adopt null")
        return self


class Merge(Section):
    draft_vocab_size: Positive
