"""The serving policy in the words of the engines that can follow it: files beside reports/policy.json and in every release.

    sglang_adaptive.json   SGLang 0.5.23: --speculative-adaptive --speculative-adaptive-config <this file>
    vllm_speculative.json  vLLM (documented for 0.25.0): --speculative-config '<this file, with "model": <the draft>>'

Both follow the running batch size at once: neither knows hysteresis, nor a batch that was not measured, which both files
therefore name, as plain decoding. Off is not free in SGLang: the draft still takes in every token, so that it is ready, unless
SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND is set (then requests that run across a switch draft badly). Both turn themselves off,
with a warning, under data parallelism (SGLang: of the attention); `without_switching` in the policy says what fits then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.contracts.files import canonical, whole_folder, write_whole
from stages.contracts.policy import ServingPolicy

SERVING = Path("reports/serving")
SGLANG_ADAPTIVE = "sglang_adaptive.json"
VLLM_SPECULATIVE = "vllm_speculative.json"
_NO_END = 1_000_000  # requests: vLLM wants an end, and lends the last draft length to every batch beyond it


def runs(policy: ServingPolicy) -> list[tuple[int, int | None, int]]:
    """(first batch, last, draft steps) from 1 on, neighbours of equal steps joined; the last has no end."""
    joined: list[tuple[int, int | None, int]] = []
    for span in policy.spans():
        if joined and joined[-1][2] == span.draft_steps:
            joined[-1] = (joined[-1][0], span.last, span.draft_steps)
        else:
            joined.append((span.first, span.last, span.draft_steps))
    return joined


def sglang_adaptive(policy: ServingPolicy) -> dict[str, Any]:
    """SGLang's adaptive configuration: by the smallest batch that it holds for, the draft lengths to choose from.

    One length each, so that its own average of accepted tokens has nothing to choose: it has no model of cost, and what
    was measured decides. With CUDA graphs SGLang rounds a batch up to the next one captured before it looks here.
    """
    return {str(first): {"candidate_steps": [steps]} for first, _, steps in runs(policy)}


def sglang_flags(policy: ServingPolicy, config: Path) -> dict[str, Any]:
    """The settings that go with it, by SGLang's field names; none when the policy never drafts: no draft is served then.

    The number of steps to start with must be one of the file's; the longest sizes the buffers.
    """
    most = max(steps for _, _, steps in runs(policy))
    if not most:
        return {}
    return {
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(config),
        "speculative_num_steps": most,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": most + 1,
    }


def vllm_speculative(policy: ServingPolicy) -> dict[str, Any]:
    """vLLM's speculative configuration without the draft's path: [from, to, draft steps], both ends counted.

    A policy that never drafts is an empty configuration: vLLM wants at least one drafted token, and no draft is served.
    """
    most = max(steps for _, _, steps in runs(policy))
    if not most:
        return {}
    schedule = [[first, last or _NO_END, steps] for first, last, steps in runs(policy)]
    return {
        "method": "eagle3",
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": schedule,
    }


def serving_files(policy: ServingPolicy) -> dict[str, bytes]:
    """Both files, by name."""
    return {
        SGLANG_ADAPTIVE: canonical(sglang_adaptive(policy)),
        VLLM_SPECULATIVE: canonical(vllm_speculative(policy)),
    }


def write_serving(policy: ServingPolicy, folder: Path) -> None:
    """Write both files as a folder, whole or not at all."""
    with whole_folder(folder) as aside:
        for name, text in serving_files(policy).items():
            write_whole(aside / name, text)
