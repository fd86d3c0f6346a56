"""SGLang's own model, attention backend and memory pool over one row, without a server: run by SGLang's python, not by pytest.

    python driver.py TARGET ASKED STATES

ASKED is JSON: {"prompt": ids, "then": ids, "lists": {name: layer ids, or null for SGLang's own}}. For each list the states that
SGLang captures are written to STATES, [tokens, captures · H]: the prompt's in one prefill, then a token a decoding step. What
it says where it will not is printed as JSON, by name.
"""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sglang_cpu"))  # the stand-ins of this very tree

import torch
from safetensors.torch import save_file
from sglang.benchmark.one_batch import TreeCacheNamespace, _init_process_global_configs, load_model
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish, spawn_world_rank
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


def load(target: str) -> Any:
    """SGLang's model runner of a target, as its one-batch benchmark makes one."""
    load_plugins()
    args = ServerArgs(
        model_path=target,
        device="cpu",
        dtype="float32",
        attention_backend="intel_amx",
        context_length=256,
        max_running_requests=2,
        max_total_tokens=512,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        grammar_backend="none",
    )
    args.resolve_once()
    _set_envs_and_config(args)
    ports = PortArgs.init_new(args)
    ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
    publish(args, role="scheduler", ranks=ranks)
    _init_process_global_configs()
    runner, _ = load_model(args, ports, 0, 0)
    return runner.torch_runner


def new_batch(runner: Any, prompt: list[int]) -> Any:
    req = Req("row", "", array("q", prompt), SamplingParams(temperature=0, max_new_tokens=8))
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    req.extend_end = len(prompt)
    pool = runner.token_to_kv_pool_allocator
    return ScheduleBatch.init_new(
        reqs=[req],
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=pool,
        tree_cache=TreeCacheNamespace(
            page_size=get_schedule().page_size, device=runner.device, token_to_kv_pool_allocator=pool
        ),
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )


def captured(runner: Any, batch: Any) -> torch.Tensor:
    forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    forward.capture_hidden_mode = CaptureHiddenMode.FULL
    return runner.forward(forward).logits_output.hidden_states.clone()


@torch.no_grad()
def states(runner: Any, prompt: list[int], then: list[int]) -> torch.Tensor:
    """States of prompt and `then`, [tokens, captures · H]."""
    try:
        batch = new_batch(runner, prompt)
        batch.prepare_for_extend()
        batch.input_ids = batch.prefill_input_ids_cpu if batch.input_ids is None else batch.input_ids
        parts = [captured(runner, batch)]
        for token in then:
            batch.input_ids = torch.tensor([token])
            batch.prepare_for_decode()
            parts.append(captured(runner, batch))
        return torch.cat(parts)
    finally:
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()


def main() -> None:
    target, asked, out = sys.argv[1:]
    told = json.loads(Path(asked).read_text())
    runner = load(target)
    found: dict[str, torch.Tensor] = {}
    refused: dict[str, str] = {}
    for name, ids in told["lists"].items():
        runner.model.set_eagle3_layers_to_capture(ids)
        try:
            found[name] = states(runner, told["prompt"], told["then"])
        except (RuntimeError, ValueError) as error:
            refused[name] = str(error)
    save_file(found, out)
    print(json.dumps({"class": type(runner.model).__name__, "refused": refused}))


if __name__ == "__main__":
    main()
