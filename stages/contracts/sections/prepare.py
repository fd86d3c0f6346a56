"""params.yaml: prepare, with its sources, rendering and answers."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.contracts.sections.base import Number, Positive, Section, Seed, Share, Whole


class Source(Section):
    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)
    ]  # a folder; its neighbours have dots
    kind: Literal["human_eval", "stdlib", "bfcl", "chatable", "jsonl", "files"]
    domain: str
    licence: str
    answers: Literal["regenerate", "given"]
    limit: Positive
    path: str | None = None
    weight: Annotated[Number, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _path_fits_kind(self) -> Source:
        of_files = self.kind in ("jsonl", "files")
        if of_files != (self.path is not None):
            raise ValueError("`path` is needed by the kinds files and jsonl, and only by them")
        if self.path is not None and not self.path.strip():
            raise ValueError("`path` is empty, which would be all of the current folder: name a file, folder or glob")
        if not of_files and self.answers == "given":
            raise ValueError(f"kind {self.kind} holds prompts without answers: answers must be `regenerate`")
        return self

    @field_validator("domain")
    @classmethod
    def _domain_has_a_name(cls, domain: str) -> str:
        if not domain.strip() or domain == "out_of_distribution":
            raise ValueError("a domain needs a name, and out_of_distribution is that of the prompts kept apart")
        return domain


class Rendering(Section):
    """How messages become token ids: what the server is told beside them, and what becomes of what a template drops."""

    template_arguments: dict[str, Any]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None
    rewritten_history: Literal["split", "last", "reject"]
    think_tags: Literal["split", "as_is"]
    dropped_reasoning: Literal["restore", "reject"]
    empty_reasoning: Literal["skip", "keep"]
    unknown_tools: Literal["as_text", "reject"]
    tokenise: Literal["by_word", "whole"] = "by_word"

    @field_validator("date", mode="before")
    @classmethod
    def _date_as_text(cls, date: object) -> object:
        """A day that is none is refused here; so is a bare one, which YAML reads as a date and DVC then cannot."""
        if isinstance(date, datetime.date):
            raise ValueError(f"a bare date, which DVC cannot read: write '{date}', in quotes")
        if isinstance(date, str):
            datetime.date.fromisoformat(date)
        return date


class Answers(Section):
    """Who answers the prompts: the target in this process, or the server that serves it."""

    engine: Literal["in_process", "openai"]
    base_url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None
    model: str | None
    concurrency: Positive
    timeout_s: Annotated[Number, Field(gt=0)]
    retries: Annotated[Whole, Field(ge=0, le=20)]
    token_ids: Literal["require", "retokenise"]
    max_failed_share: Share

    @property
    def name(self) -> str:
        """What the manifest calls it: where a server stands does not matter, which model it was asked for does."""
        return self.engine if self.engine == "in_process" else f"{self.engine} {self.model}"

    @model_validator(mode="after")
    def _server_has_an_address(self) -> Answers:
        if self.engine == "openai" and not (self.base_url and self.model):
            raise ValueError("engine openai needs `base_url` and `model`")
        if self.base_url and "@" in self.base_url.split("//", 1)[1].split("/", 1)[0]:
            raise ValueError("`base_url` holds credentials; give the key in the environment variable DRAFTLINE_API_KEY")
        return self


class Prepare(Section):
    seed: Seed
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    max_prompt_tokens: Positive
    max_new_tokens: Positive
    max_row_tokens: Positive
    temperature: Annotated[Number, Field(ge=0, le=2)]
    batch_size: Positive
    workers: Positive
    readers: Positive
    capped: Literal["keep", "drop"]
    repetitive: Literal["drop", "keep"]
    held_out_share: Annotated[Number, Field(gt=0, lt=1)]
    out_of_distribution: Annotated[Whole, Field(ge=0)]
    rendering: Rendering
    answers: Answers
    near_duplicates: Literal["keep", "drop"]
    near_duplicate_similarity: Annotated[Number, Field(ge=0.5, le=1)]
    benchmark_prompts: tuple[str, ...]

    @field_validator("benchmark_prompts")
    @classmethod
    def _benchmarks_have_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        if not all(path.strip() for path in paths):
            raise ValueError("a path is empty, which would be all of the current folder: name a file, folder or glob")
        return paths

    @model_validator(mode="after")
    def _all_weights_or_none(self) -> Prepare:
        bare = sorted(s.name for s in self.sources if s.weight is None)
        if bare and len(bare) < len(self.sources):
            raise ValueError(f"sources without a weight beside sources with one: {bare}")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Prepare:
        names = [s.name.lower() for s in self.sources]
        doubled = sorted({s.name for s in self.sources if names.count(s.name.lower()) > 1})
        if doubled:
            raise ValueError(f"source names are doubled, upper and lower case taken as one: {doubled}")
        return self
