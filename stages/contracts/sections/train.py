"""params.yaml: train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from stages.contracts.draft import NORMS, DraftNorm
from stages.contracts.sections.base import Number, Positive, Section, Seed, Share, Whole

# In one order, so that equal choices are equal parameters.
Norms = Annotated[tuple[DraftNorm, ...], AfterValidator(lambda told: tuple(name for name in NORMS if name in told))]


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
    norms: Norms = Field(default=(), exclude_if=lambda norms: not norms)  # plain drafts keep the digests of before
    head: Literal["trained", "frozen"]
    loss: Literal["kl", "ce", "lk"]
    chains: Literal["all", "accepted"] = Field(
        default="all", exclude_if=lambda chains: chains == "all"
    )  # as with norms
    products: Literal["auto", "float32", "bfloat16"]
    evaluate_every: Positive
    evaluate_train_rows: Annotated[Whole, Field(ge=0)]
    stop_after: Annotated[Whole, Field(ge=0)]
    max_loss_jump: Annotated[Number, Field(ge=0)]
    checkpoint_every: Positive
    tensorboard: bool
    accumulate: Positive
    recompute_steps: bool
    processes: Annotated[Whole, Field(ge=1, le=64)]
    shard_weights: bool
    start_from: Annotated[str, Field(min_length=1)] | None
    start_vocabulary: Literal["keep", "rebuild"]
    export_dtype: Literal["float32", "bfloat16"]
