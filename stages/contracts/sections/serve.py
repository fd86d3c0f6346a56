"""params.yaml: serve, with SGLang's settings, and benchmark."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from stages.contracts.sections.base import Number, Positive, Section, Seed, Whole

_LONGEST_S = 1800  # of one repeat's arrivals


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
    hold_steps: Annotated[Whole, Field(ge=1, le=1000)]
    band: Annotated[Whole, Field(ge=0)]
    arrival_rates: tuple[Annotated[Number, Field(gt=0, le=10_000)], ...]
    arrival_requests: Annotated[Whole, Field(ge=2)]
    seed: Seed

    @model_validator(mode="after")
    def _concurrencies_ascend(self) -> Benchmark:
        if list(self.concurrencies) != sorted(set(self.concurrencies)):
            raise ValueError(f"concurrencies {list(self.concurrencies)} are not ascending and distinct")
        return self

    @model_validator(mode="after")
    def _rates_make_sense(self) -> Benchmark:
        if list(self.arrival_rates) != sorted(set(self.arrival_rates)):
            raise ValueError(f"arrival_rates {list(self.arrival_rates)} are not ascending and distinct")
        if self.arrival_rates and (lasts := self.arrival_requests / self.arrival_rates[0]) > _LONGEST_S:
            raise ValueError(
                f"arrival_rates {self.arrival_rates[0]:g}/s: {self.arrival_requests} requests would take {lasts:.0f} s to arrive, "
                f"each repeat of each arm; at most {_LONGEST_S} s make sense"
            )
        return self
