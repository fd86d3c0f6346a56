"""params.yaml: gates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stages.contracts.sections.base import Number, Positive, Section, Share


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
    max_speedup_over_accept_length: Annotated[Number, Field(ge=1)]


class Gates(Section):
    extraction: ExtractionGate
    training: TrainingGate
    deployment: DeploymentGate
