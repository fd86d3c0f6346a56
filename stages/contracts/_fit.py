"""How the sections of params.yaml fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stages.contracts.errors import ParamsError
from stages.contracts.points import check_points

if TYPE_CHECKING:
    from stages.contracts.params import Benchmark, Capture, Serve, Target


def between_sections(sections: Mapping[str, Any]) -> list[str]:
    """What sections that are sound by themselves say against each other, a line each; absent sections are not judged."""
    target, prepare, merge = (sections.get(name) for name in ("target", "prepare", "merge"))
    train, capture, gates = (sections.get(name) for name in ("train", "capture", "gates"))
    serve = sections.get("serve")
    faults: list[str] = []
    if target and capture:
        faults += _points(capture, target)
    if target and merge and merge.draft_vocab_size > target.vocab_size:
        faults.append(f"merge.draft_vocab_size {merge.draft_vocab_size} exceeds target.vocab_size {target.vocab_size}")
    if serve:
        faults += _serving(serve, target, sections.get("benchmark"))
    if train and train.heads % train.kv_heads:
        faults.append(f"train.heads {train.heads} is not a multiple of train.kv_heads {train.kv_heads}")
    if train and train.head_dim % 2:
        faults.append(f"train.head_dim {train.head_dim} is odd; rotary positions turn pairs")
    if train and {"fc_norm", "norm_before_fc"} <= set(train.norms):
        faults.append("train.norms has fc_norm and norm_before_fc: one norms each state, the other all three as one")
    if prepare and (room := prepare.max_prompt_tokens + prepare.max_new_tokens) > prepare.max_row_tokens:
        faults.append(
            f"prepare.max_row_tokens {prepare.max_row_tokens} is below max_prompt_tokens + max_new_tokens = {room}"
        )
    if prepare and gates:
        domains = {s.domain for s in prepare.sources}
        if strange := sorted(set(gates.deployment.min_domain_accept_length) - domains):
            faults.append(
                f"gates.deployment.min_domain_accept_length names {strange}; the sources' domains are {sorted(domains)}"
            )
    return faults


def _points(capture: Capture, target: Target) -> list[str]:
    try:
        check_points(capture.points, target.layers)
    except ParamsError as error:
        return [f"capture.points {error.got}; expected {error.expected}; {error.do}"]
    return []


def _serving(serve: Serve, target: Target | None, benchmark: Benchmark | None) -> list[str]:
    faults: list[str] = []
    if target and (serve.engine, target.device) == ("sglang", "cpu") and serve.sampling_prompts:
        faults.append(
            f"serve.sampling_prompts {serve.sampling_prompts}: SGLang verifies greedily on a CPU whatever the temperature; it must be 0"
        )
    if benchmark is None:
        return faults
    if serve.engine == "in_process" and benchmark.arrival_rates:
        faults.append(
            f"benchmark.arrival_rates {list(benchmark.arrival_rates)}: the engine in this process takes all requests at once; arrivals "
            "need serve.engine sglang, or []"
        )
    if serve.engine == "sglang" and serve.draft_steps not in benchmark.draft_steps:
        faults.append(
            f"benchmark.draft_steps {list(benchmark.draft_steps)} lacks serve.draft_steps {serve.draft_steps}, the length that was validated"
        )
    if serve.engine == "sglang" and serve.sglang.url and len(benchmark.draft_steps) > 1:
        faults.append(
            f"benchmark.draft_steps {list(benchmark.draft_steps)}: a server that runs already drafts one number of tokens, {serve.draft_steps}"
        )
    return faults
