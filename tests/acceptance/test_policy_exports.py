"""The policy as SGLang's and vLLM's own configuration."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from stages.contracts.policy import PolicyLevel, ServingPolicy
from stages.contracts.serving import sglang_adaptive, sglang_flags, vllm_speculative, write_serving


def policy(levels: dict[int, int], measured_from: int = 1, up_to: int = 16) -> ServingPolicy:
    return ServingPolicy(
        draft_digest="sha256:0",
        engine="sglang",
        engine_version="0.5.23",
        device="cpu",
        levels=tuple(PolicyLevel(min_batch=b, draft_steps=k, ratio=1, low=1, high=1) for b, k in levels.items()),
        measured_from=measured_from,
        measured_up_to=up_to,
    )


def sglang_steps(config: dict, batch: int) -> int:
    """As SGLang reads it: the entry with the largest key that is not above the batch, the smallest key below all."""
    keys = sorted(int(k) for k in config)
    (steps,) = config[str(max([k for k in keys if k <= batch], default=keys[0]))]["candidate_steps"]
    return steps


def vllm_steps(config: dict, batch: int) -> int:
    """As vLLM reads it: ranges with both ends, gaps and what lies beyond inherit the range before."""
    schedule = config["num_speculative_tokens_per_batch_size"]
    assert schedule[0][0] == 1 and all(a[1] < b[0] for a, b in pairwise(schedule))
    assert all(0 <= k <= config["num_speculative_tokens"] for _, _, k in schedule)
    return [k for first, _, k in schedule if first <= batch][-1]


def test_both_engines_read_the_policy_s_steps_at_every_batch_measured_or_not() -> None:
    for chosen in (
        policy({1: 3, 2: 1, 9: 0}),
        policy({1: 3, 2: 3, 3: 3}),  # on to the very end of what was measured
        policy({2: 3, 5: 0, 32: 2}, measured_from=2, up_to=64),
    ):
        sglang, vllm = sglang_adaptive(chosen), vllm_speculative(chosen)
        for batch in range(1, 200):
            assert sglang_steps(sglang, batch) == chosen.steps_for(batch) == vllm_steps(vllm, batch)


def test_what_was_not_measured_is_written_out_and_neighbours_are_joined() -> None:
    chosen = policy({2: 3, 3: 3, 5: 1}, measured_from=2, up_to=8)
    assert sglang_adaptive(chosen) == {
        "1": {"candidate_steps": [0]},
        "2": {"candidate_steps": [3]},
        "5": {"candidate_steps": [1]},
        "9": {"candidate_steps": [0]},
    }
    assert vllm_speculative(chosen) == {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1, 0], [2, 4, 3], [5, 8, 1], [9, 1_000_000, 0]],
    }


def test_a_policy_that_never_drafts_asks_for_no_speculation() -> None:
    never = policy({1: 0})
    assert sglang_adaptive(never) == {"1": {"candidate_steps": [0]}}
    assert sglang_flags(never, Path("x")) == vllm_speculative(never) == {}


def test_the_files_are_whole_json_and_name_the_flags_that_go_with_them(tmp_path: Path) -> None:
    chosen = policy({1: 3, 2: 1, 9: 0})
    write_serving(chosen, tmp_path / "serving")
    assert json.loads((tmp_path / "serving/sglang_adaptive.json").read_text()) == sglang_adaptive(chosen)
    assert json.loads((tmp_path / "serving/vllm_speculative.json").read_text()) == vllm_speculative(chosen)
    flags = sglang_flags(chosen, tmp_path / "serving/sglang_adaptive.json")
    assert flags["speculative_num_steps"] == 3 and flags["speculative_num_draft_tokens"] == 4
    assert flags["speculative_adaptive"] is True and flags["speculative_eagle_topk"] == 1
