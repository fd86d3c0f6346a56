"""What a serving engine's Prometheus page says about speculation, in this line's own terms.

Accept length is tokens / verifications over whole answers (stages/contracts/evidence.py). SGLang counts both when a request
ends: sglang:generation_tokens_total and sglang:spec_verify_calls_total. vLLM counts a verification as a draft and the tokens
accepted of it; the bonus token is one a draft, and the first token of an answer comes from the prompt's pass:
tokens = drafts + accepted + requests finished. Where either has no such counters there is nothing to judge by: SGLang's gauge
sglang:spec_accept_length is the mean of the last few decoding steps of one rank, and is shown, never tested.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from stages.contracts.errors import DataError

Engine = Literal["sglang", "vllm"]
Quantity = Literal["verifications", "tokens", "accepted", "requests", "prompt_tokens"]
COUNTERS: dict[Engine, dict[str, Quantity]] = {
    "sglang": {
        "sglang:spec_verify_calls_total": "verifications",
        "sglang:generation_tokens_total": "tokens",
        "sglang:num_requests_total": "requests",
        "sglang:prompt_tokens_total": "prompt_tokens",
    },
    "vllm": {
        "vllm:spec_decode_num_drafts_total": "verifications",
        "vllm:spec_decode_num_accepted_tokens_total": "accepted",
        "vllm:request_success_total": "requests",
        "vllm:prompt_tokens_total": "prompt_tokens",
    },
}
_LENGTHS: dict[Engine, str] = {
    "sglang": "sglang:prompt_tokens_histogram_bucket",
    "vllm": "vllm:request_prompt_tokens_bucket",
}
_GAUGES = {"accept": "sglang:spec_accept_length", "rate": "sglang:gen_throughput", "steps": "sglang:spec_num_steps"}
_ONE_RANK = ("tp_rank", "pp_rank", "moe_ep_rank")  # ranks of one replica decode the same requests


@dataclass(frozen=True)
class Reading:
    """One page. Counters by their whole name, labels included; `quantity` and `bucket` say what each of them counts."""

    engine: Engine
    counters: dict[str, float]
    quantity: dict[str, Quantity]
    bucket: dict[str, float]
    gauges: dict[str, float] = field(default_factory=lambda: {})


def read_page(text: str, where: str) -> Reading:
    """Parse a metrics page; the engine is told by the names.

    Raises:
        DataError: no page of SGLang or vLLM, or one without counters of speculation.
    """
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError as error:
        raise _no_page(where, f"{error}; it begins {text[:60]!r}") from error
    names = {s.name for s in samples}
    engine: Engine | None = next((e for e in COUNTERS if any(n.startswith(f"{e}:") for n in names)), None)
    if engine is None:
        raise _no_page(where, f"{len(names)} metrics, none of them theirs")
    quantities, lengths = COUNTERS[engine], _LENGTHS[engine]
    counters: dict[str, float] = {}
    quantity: dict[str, Quantity] = {}
    bucket: dict[str, float] = {}
    for sample in samples:
        key = _key(sample)
        if sample.name in quantities:
            counters[key], quantity[key] = sample.value, quantities[sample.name]
        elif sample.name == lengths:
            counters[key], bucket[key] = sample.value, float(sample.labels["le"])
    served = sum(value for key, value in counters.items() if quantity.get(key) in ("tokens", "requests"))
    if (
        served and "verifications" not in quantity.values()
    ):  # before the first answer SGLang writes none of its counters
        raise DataError(
            "This engine tells no counters of speculation",
            where=where,
            expected=" or ".join(n for e in COUNTERS for n, q in COUNTERS[e].items() if q == "verifications"),
            got=f"a page of {engine} without it",
            do="serve with a draft; SGLang counts since 0.5.13 and writes the counter once a request has ended",
        )
    return Reading(engine, counters, quantity, bucket, _gauges(samples))


def _no_page(where: str, got: str) -> DataError:
    return DataError(
        "This is no metrics page of SGLang or vLLM",
        where=where,
        expected="metrics that begin with sglang: or vllm:",
        got=got,
        do="start SGLang with --enable-metrics, and name the server's own address in params.yaml: drift.endpoints",
    )


def _key(sample: Sample) -> str:
    return sample.name + "|" + "|".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))


def _gauges(samples: Iterable[Sample]) -> dict[str, float]:
    """SGLang's gauges over all replicas: accept length weighted right, and draft steps now in use.

    Each rank's gauge is an average of its own last steps. Ranks of one replica tell the same, so one of them counts. Over
    replicas tokens are summed and verifications are summed: with tokens/s r and accept length a that is sum(r) / sum(r/a),
    not the mean of a.
    """
    by_name: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for sample in samples:
        replica = tuple(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in _ONE_RANK)
        for word, name in _GAUGES.items():
            if sample.name == name:
                by_name[word][replica] = max(sample.value, by_name[word].get(replica, 0.0))
    accept, rate = by_name["accept"], by_name["rate"]
    busy = {r: rate[r] for r in accept if accept[r] > 0 and rate.get(r, 0.0) > 0}
    found = {"draft_steps": max(by_name["steps"].values())} if by_name["steps"] else {}
    if busy:
        found["accept_length_now"] = sum(busy.values()) / sum(rate / accept[r] for r, rate in busy.items())
    return found


def increase(before: Mapping[str, float] | None, after: Mapping[str, float]) -> dict[str, float]:
    """How much each counter grew. One that fell began anew at 0 (its server restarted), and one that was not there before
    began at 0 too; of a server's first page nothing is known to be new."""
    if before is None:
        return {key: 0.0 for key in after}
    return {
        key: value - before.get(key, 0.0) if value >= before.get(key, 0.0) else value for key, value in after.items()
    }


@dataclass
class Window:
    """What was served between two looks, summed over every series, rank and replica. `lengths`: requests by the upper bound
    of their prompt's length, not cumulative."""

    verifications: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    lengths: dict[float, float] = field(default_factory=lambda: {})

    @property
    def accept_length(self) -> float:
        """Tokens a verification. Asked only of windows with verifications."""
        return self.tokens / self.verifications

    def add(self, other: Window) -> None:
        self.verifications += other.verifications
        self.tokens += other.tokens
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        for bound, count in other.lengths.items():
            self.lengths[bound] = self.lengths.get(bound, 0.0) + count


def window_of(reading: Reading, grown: Mapping[str, float]) -> Window:
    """The window that these increases make."""
    total: dict[str, float] = defaultdict(float)
    for key, quantity in reading.quantity.items():
        total[quantity] += grown[key]
    cumulative: dict[float, float] = defaultdict(float)
    for key, bound in reading.bucket.items():
        cumulative[bound] += grown[key]
    below, lengths = 0.0, dict[float, float]()
    for bound in sorted(cumulative):
        lengths[bound], below = cumulative[bound] - below, cumulative[bound]
    tokens = total["tokens"]
    if reading.engine == "vllm":
        tokens = total["verifications"] + total["accepted"] + total["requests"]
    return Window(total["verifications"], tokens, total["requests"], total["prompt_tokens"], lengths)
