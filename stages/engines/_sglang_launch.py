"""The launch command, made of params and the draft's record: never of flags written by hand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contracts.errors import EngineError
from stages.contracts.params import SGLang
from stages.engines._sglang_checks import ALGORITHM, DraftFacts


@dataclass(frozen=True)
class Launch:
    """A server to be started. `positions`: tokens of the longest request, prompt and answer; `capture_ids`: layer ids, in this
    engine's own numbering, whose states it is to hand out with no draft at all; `first_gpu`: of those it takes."""

    target: Path
    device: str
    dtype: str
    threads: int
    concurrency: int
    positions: int
    draft: DraftFacts | None = None
    draft_steps: int = 0
    capture_ids: tuple[int, ...] = ()
    adaptive: Path | None = None  # the serving policy as SGLang's adaptive configuration (contracts/serving.py)
    first_gpu: int = 0

    def fields(self, told: SGLang) -> dict[str, Any]:
        """All settings that are not left to SGLang, by its own field names."""
        fields: dict[str, Any] = {
            "model_path": str(self.target.resolve()),
            "device": self.device,
            "dtype": self.dtype,
            "context_length": told.context_tokens,
            "max_running_requests": self.concurrency,
            "disable_radix_cache": True,  # a cached prefix has no states to hand out, and would make one arm faster
            "stream_interval": 1,  # an event for each verification: its order is in no other report
            "tp_size": told.tensor_parallel,
            "dp_size": told.data_parallel,
            "attn_dp_size": told.attention_data_parallel,
            "ep_size": told.expert_parallel,
            "nnodes": told.nodes,
            "node_rank": told.node_rank,
        }
        optional = {
            "attention_backend": told.attention_backend.removeprefix("auto"),
            "max_total_tokens": told.max_total_tokens,
            "mem_fraction_static": told.memory_fraction,
            "quantization": told.quantization.removeprefix("none"),
            "moe_a2a_backend": told.moe_a2a_backend.removeprefix("none"),
            "kv_cache_dtype": told.kv_cache_dtype.removeprefix("auto"),
            "dist_init_addr": told.rendezvous,
            "base_gpu_id": self.first_gpu,
            "trust_remote_code": told.trust_remote_code,
            "enable_nccl_nvls": told.nccl_nvls,
            "disable_custom_all_reduce": not told.custom_all_reduce and self.device == "cuda",
        }
        fields |= {name: value for name, value in optional.items() if value}
        if self.device == "cpu":
            fields |= {"disable_overlap_schedule": True, "grammar_backend": "none", "sleep_on_idle": True}
        elif not told.cuda_graphs:
            fields |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
        return fields | self._states() | self._speculation()

    def _states(self) -> dict[str, Any]:
        if not self.capture_ids:
            return {"enable_return_hidden_states": True}
        return {
            "enable_return_aux_hidden_states": True,
            "speculative_algorithm": ALGORITHM,  # names the way of capturing; without a draft nothing is speculated
            "return_aux_hidden_state_layer_ids": list(self.capture_ids),
        }

    def _speculation(self) -> dict[str, Any]:
        if self.draft is None or self.capture_ids:
            return {}
        told = {
            "speculative_algorithm": ALGORITHM,
            "speculative_draft_model_path": str(self.draft.folder.resolve()),
            "speculative_num_steps": self.draft_steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.draft_steps + 1,
        }
        return told | self._adaptive()

    def _adaptive(self) -> dict[str, Any]:
        """A server that turns it off says so in its log alone; the effective value is read back with all others."""
        if self.adaptive is None:
            return {}
        told = {"speculative_adaptive": True, "speculative_adaptive_config": str(self.adaptive.resolve())}
        if self.device == "cpu":  # a decode graph of its own for every draft length is more than a CPU's runner has
            told |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
        return told

    def expected(self, told: SGLang) -> dict[str, Any]:
        """What the server must report once it runs: all that it was told, save what it takes for a mere name."""
        fields = self.fields(told)
        if self.capture_ids:
            fields["speculative_algorithm"] = None
        # Flags of their own on the command line, and parts of one setting in what the server reports.
        graphs = {"cuda_graph_backend_decode", "cuda_graph_backend_prefill"} & fields.keys()
        parts = {f"cuda_graph_config.{name.rpartition('_')[2]}.backend": fields.pop(name) for name in sorted(graphs)}
        return fields | parts


def arguments(fields: Mapping[str, Any]) -> list[str]:
    """Command-line arguments of `fields`: True is a bare flag, False and None are left out."""
    said: list[str] = []
    for name, value in fields.items():
        if value is None or value is False:
            continue
        said.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            said += [str(v) for v in value]
        elif value is not True:
            said.append(str(value))
    return said


def command(fields: Mapping[str, Any], python: str, port: int) -> list[str]:
    """The whole command; the server listens on the loopback alone.

    Raises:
        EngineError: there is no such interpreter.
    """
    # Neither resolved nor made absolute by following links: a virtual environment's python is a link.
    path = Path(python) if Path(python).is_absolute() else Path.cwd() / python
    if not os.access(path, os.X_OK):
        raise EngineError(
            "There is no interpreter to start SGLang with",
            where="params.yaml: serve.sglang.python",
            expected="the python of an environment that has SGLang 0.5.23",
            got=f"{python} is not there",
            do="run `make sglang` for a CPU, or name the python of your own SGLang environment",
        )
    start = [str(path), "-P", "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
    return start + arguments(fields)


def environment(device: str, threads: int) -> dict[str, str]:
    """The child's environment: this one's, offline; on a CPU with SGLang's CPU engine and passive threads."""
    env = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_DISABLE_USAGE_STATS": "1"}
    env.pop("PYTHONPATH", None)  # that of the line's own environment
    if device == "cpu":
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        env["TORCH_COMPILE_DISABLE"] = "1"  # it would need a C++ compiler, and longer to start than it saves
    return env
