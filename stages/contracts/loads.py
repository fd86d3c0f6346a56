"""What a benchmark measured besides throughput: latencies, arrivals at random, first requests, and under which conditions."""

from __future__ import annotations

from typing import Literal

from stages.contracts.files import Fact


class Percentiles(Fact):
    """Of one time over all requests of all repeats, ms."""

    p50: float
    p90: float
    p99: float


class Latencies(Fact):
    """Of requests: until the first token, between tokens after it (mean of a request), until the last.

    A request waits in a closed loop from the moment it is sent, at random arrivals from the moment it was due.
    """

    first_token_ms: Percentiles
    per_token_ms: Percentiles
    whole_ms: Percentiles


class OpenLoop(Fact):
    """One arm under requests that arrive at random (Poisson) and wait for nobody.

    overloaded: the rate is above what the arm completed at its best in the closed loop; then the queue grows as long as requests
    come, and latencies tell the length of the run. late_start_p99_ms: how late this client sent requests.
    """

    arm: Literal["plain", "speculative"]
    draft_steps: int
    rate_per_s: float
    requests: int
    tokens_per_s: tuple[float, ...]
    latencies: Latencies
    accept_length: float
    closed_loop_per_s: float
    overloaded: bool
    late_start_p99_ms: float


class FirstRequest(Fact):
    """The very first request after an engine was opened (cold), and the same request again (warm)."""

    arm: Literal["plain", "speculative"]
    draft_steps: int
    cold_first_token_ms: float
    cold_whole_ms: float
    warm_first_token_ms: float
    warm_whole_ms: float


class Conditions(Fact):
    """What held for every arm, and how that is known.

    settings_compared: settings that the engines reported and that were found equal in all arms, speculation apart; 0 where one
    engine serves all arms. cached_prompt_tokens: prompt tokens that came from a prefix cache, all measured requests together.
    policy_served_by: how the policy's arm gets its draft length: one engine that switches, or an engine for each.
    """

    engines: Literal["in this process", "servers started", "servers attached"]
    cache: Literal["none", "off", "flushed before each repeat"]
    temperature: float
    ignore_end_of_turn: bool
    settings_compared: int
    cached_prompt_tokens: int
    policy_served_by: Literal["one engine", "an engine for each draft length"]
    warnings: tuple[str, ...]
