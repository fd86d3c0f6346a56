"""What serve-validate and benchmark found: measurements that gate-deployment judges."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.contracts.files import Fact
from stages.contracts.loads import Conditions, FirstRequest, Latencies, OpenLoop
from stages.contracts.policy import POLICY as POLICY
from stages.contracts.policy import PolicyLevel as PolicyLevel
from stages.contracts.policy import ServingPolicy as ServingPolicy

TRAIN_METRICS = Path("reports/train.json")
TRAIN_CURVES = Path("reports/curves")
SERVE_EVIDENCE = Path("reports/serve_validate.json")
BENCHMARK_EVIDENCE = Path("reports/benchmark.json")


class AcceptLength(Fact):
    """tokens / verifications over whole answers: the bonus token is counted, as SGLang does; plain decoding is 1.0.

    by_position[i] is the share of verifications in which draft token i (0-based) was accepted.
    """

    requests: int
    tokens: int
    verifications: int
    accept_length: float
    low: float
    high: float
    by_position: tuple[float, ...]


class TrainMetrics(Fact):
    """reports/train.json: held-out figures of the exported draft, simulated from stored states. train_like: the same of a
    sample of the training rows; stopped_after: the step after which nothing improved any more, where that ended the run;
    both left out where there is none."""

    draft_digest: str
    train_loss: float
    held_out_loss: float
    overall: AcceptLength
    by_domain: dict[str, AcceptLength]
    optimizer_steps: int
    parameters: int
    train_like: AcceptLength | None = Field(default=None, exclude_if=lambda found: found is None)
    stopped_after: int | None = Field(default=None, exclude_if=lambda step: step is None)


class ParitySlot(Fact):
    """One slot the engine fed the draft, against the target recomputed at every point: of `rows` rows with `tokens` tokens
    in all, the one that disagrees most."""

    slot: int
    claimed_point: int
    nearest_point: int
    distance: float
    claimed_distance: float
    next_best_distance: float
    rows: int
    tokens: int


class Losslessness(Fact):
    """Greedy output with and without speculation. `near_ties` are the answers that part ways where the target's two best
    logits differ by less than the numeric noise of batching; they are counted, listed and not called identical."""

    requests: int
    identical: int
    near_ties: int
    differing_prompt_ids: tuple[str, ...]


class SamplingFidelity(Fact):
    """Next-token distribution of speculative sampling against the target's own, total variation distance, beside the
    distance that plain sampling shows with as many draws."""

    prompts: int
    draws: int
    temperature: float
    distance: float
    distance_plain: float


class RequestRecord(Fact):
    prompt_id: str
    source: str
    domain: str
    prompt_tokens: int
    tokens: int
    verifications: int
    accepted: tuple[int, ...]
    simulated_verifications: int | None
    simulated_accepted: tuple[int, ...] | None = None


class StoppedAnswers(Fact):
    """Greedy answers with a stop condition set where speculation has most to get wrong: behind tokens it accepts at once.

    Each was asked plainly and with the draft, and must end where the answer without a condition has it first: `plain_right` and
    `drafted_right` count those that do; the drafted ones must be counted right too: what a verification accepted behind the end is
    no part of the answer. `inside_a_draft`: stops on a drafted token that the verification went beyond.
    """

    condition: Literal["token", "string"]
    requests: int
    plain_right: int
    drafted_right: int
    inside_a_draft: int
    differing_prompt_ids: tuple[str, ...]


class ServeEvidence(Fact):
    """reports/serve_validate.json."""

    version: Literal[1] = 1
    draft_digest: str
    engine: str
    engine_version: str
    draft_steps: int
    max_new_tokens: int
    parity: tuple[ParitySlot, ...]
    parity_words: str
    greedy: Losslessness
    sampling: SamplingFidelity | None
    served: AcceptLength
    served_by_domain: dict[str, AcceptLength]
    simulated: AcceptLength
    simulated_by_domain: dict[str, AcceptLength]
    requests: tuple[RequestRecord, ...]
    served_by_length: dict[str, AcceptLength] = Field(default_factory=dict)  # by prompt tokens, as "65-128"
    greedy_by_domain: dict[str, Losslessness] = Field(default_factory=dict)
    stops: tuple[StoppedAnswers, ...] = ()


class Arm(Fact):
    """One way of serving at one concurrency: tokens/s of each repeat, latency over all requests of all repeats."""

    name: Literal["plain", "speculative", "policy"]
    draft_steps: int
    concurrency: int
    tokens_per_s: tuple[float, ...]
    latency_p50_ms: float
    latency_p95_ms: float
    first_token_p50_ms: float
    accept_length: float
    latencies: Latencies | None = None


class Ratio(Fact):
    """Throughput over plain, paired by repeat: median, and a t interval at `confidence`."""

    arm: Literal["speculative", "policy"]
    draft_steps: int
    concurrency: int
    ratio: float
    low: float
    high: float
    confidence: float = 0.95


class BenchmarkEvidence(Fact):
    """reports/benchmark.json."""

    version: Literal[1] = 1
    draft_digest: str
    engine: str
    engine_version: str
    device: str
    max_new_tokens: int
    repeats: int
    arms: tuple[Arm, ...]
    ratios: tuple[Ratio, ...]
    off_cost_ratio: float | None  # None where "off" is an engine that never had a draft
    off_cost_low: float | None
    off_cost_high: float | None
    accept_length_by_domain: dict[str, AcceptLength]
    out_of_distribution: AcceptLength | None
    speculation_off_above: int | None
    policy_digest: str
    open_loop: tuple[OpenLoop, ...] = ()
    first_requests: tuple[FirstRequest, ...] = ()
    conditions: Conditions | None = None
