"""The launch command, made of params and the draft's record, and what is checked before anything starts.

Settings go by the names of SGLang's own fields, so that one check serves for a command to be run and for what a running server
says of itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contracts.errors import EngineError
from stages.contracts.params import SGLang

ALGORITHM = "EAGLE3"
CAPTURE_DTYPES = {"float32": ("float32", "float"), "bfloat16": ("bfloat16",)}


@dataclass(frozen=True)
class DraftFacts:
    """A draft as the checks see it: from config.json what an engine reads there, from the record what it was trained on.

    `served_points` are what this engine and version make of config.json's layer ids for this model class.
    """

    folder: Path
    architecture: str
    tied_embeddings: bool
    vocab_size: int
    draft_vocab_size: int
    max_positions: int
    points: tuple[int, ...]
    served_points: tuple[int, ...]
    compute_dtype: str


@dataclass(frozen=True)
class Launch:
    """A server to be started. `positions`: tokens of the longest request, prompt and answer; `capture_ids`: layer ids, in this
    engine's own numbering, whose states it is to hand out with no draft at all."""

    target: Path
    device: str
    dtype: str
    threads: int
    concurrency: int
    positions: int
    draft: DraftFacts | None = None
    draft_steps: int = 0
    capture_ids: tuple[int, ...] = ()

    def fields(self, told: SGLang) -> dict[str, Any]:
        """All settings that are not left to SGLang, by its own field names."""
        fields: dict[str, Any] = {
            "model_path": str(self.target.resolve()),
            "device": self.device,
            "dtype": self.dtype,
            "context_length": told.context_tokens,
            "max_running_requests": self.concurrency,
            "disable_radix_cache": True,  # a cached prefix has no states to hand out, and would make one arm faster
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
        return {
            "speculative_algorithm": ALGORITHM,
            "speculative_draft_model_path": str(self.draft.folder.resolve()),
            "speculative_num_steps": self.draft_steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.draft_steps + 1,
        }

    def expected(self, told: SGLang) -> dict[str, Any]:
        """What the server must report once it runs: all that it was told, save what it takes for a mere name."""
        fields = self.fields(told)
        if self.capture_ids:
            fields["speculative_algorithm"] = None
        # A deprecated spelling of one field may be resolved into others, and these two are.
        return {n: v for n, v in fields.items() if not n.startswith("cuda_graph_backend")}


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
    return env


def check_launch(
    fields: Mapping[str, Any], draft: DraftFacts | None, *, positions: int, by_value: bool = False, where: str = ""
) -> list[str]:
    """Refuse settings under which the draft cannot work as trained, before anything is started.

    Args:
        fields: by SGLang's field names: of a command, or what a running server reports.
        by_value: the layers fed are about to be compared by value, so that a wrong numbering is returned as a warning (parity
            names what was really fed) and not refused here.

    Returns:
        Warnings.

    Raises:
        EngineError: all faults at once.
    """
    faults, warnings = _length_faults(fields, draft, positions), []
    if draft is not None:
        faults += _draft_faults(fields, draft) + _numeric_faults(fields, draft)
        if draft.served_points != draft.points:
            said = f"the draft's config.json makes this engine feed points {list(draft.served_points)}, and it was trained on {list(draft.points)}"
            (warnings if by_value else faults).append(said)
    if faults:
        raise EngineError(
            "The draft would not be served as it was trained",
            where=where or "the launch command, made from params.yaml: serve, and the draft's record",
            expected="settings under which SGLang runs this draft as meant; it reports none of these faults itself",
            got="\n    " + "\n    ".join(faults),
            do="mend params.yaml: serve.sglang, or export the draft for this engine: `dvc repro train`",
        )
    return warnings


def _draft_faults(fields: Mapping[str, Any], draft: DraftFacts) -> list[str]:
    faults: list[str] = []
    algorithm, steps = fields.get("speculative_algorithm"), fields.get("speculative_num_steps") or 0
    topk, tokens = fields.get("speculative_eagle_topk") or 0, fields.get("speculative_num_draft_tokens") or 0
    if draft.architecture.endswith("Eagle3") and algorithm != ALGORITHM:
        faults.append(
            f"speculative_algorithm {algorithm} with a draft of class {draft.architecture}: the target's states would not be "
            f"captured and every verification would accept nothing; {ALGORITHM} is needed"
        )
    if not fields.get("speculative_draft_model_path"):
        faults.append("no speculative_draft_model_path: SGLang would load the target as its own draft and crash")
    if steps < 1 or topk < 1:
        faults.append(f"speculative_num_steps {steps} and speculative_eagle_topk {topk}: both must be at least 1")
    elif topk == 1 and tokens != steps + 1:
        faults.append(
            f"speculative_num_draft_tokens {tokens}: a chain (topk 1) of {steps} steps verifies {steps + 1} tokens"
        )
    if draft.tied_embeddings and draft.draft_vocab_size < draft.vocab_size:
        faults.append(
            f"tie_word_embeddings is true with a draft vocabulary of {draft.draft_vocab_size} out of {draft.vocab_size}: the "
            "head would be the embedding, of another size"
        )
    return faults


def _length_faults(fields: Mapping[str, Any], draft: DraftFacts | None, positions: int) -> list[str]:
    context = fields.get("context_length") or 0
    faults: list[str] = []
    if context and positions > context:
        faults.append(f"context_length {context} (context_tokens): the longest request has {positions} tokens")
    if draft is None:
        return faults
    longest = context or positions
    if longest > draft.max_positions:
        faults.append(
            f"context_length {longest}: the draft's max_position_embeddings is {draft.max_positions}, beyond which acceptance "
            "falls off and some engines crash"
        )
    return faults


def _numeric_faults(fields: Mapping[str, Any], draft: DraftFacts) -> list[str]:
    faults: list[str] = []
    dtype = str(fields.get("dtype") or "auto").removeprefix("torch.")
    if dtype not in CAPTURE_DTYPES.get(draft.compute_dtype, (draft.compute_dtype,)):
        faults.append(f"dtype {dtype}: the states the draft was trained on were computed in {draft.compute_dtype}")
    if quantization := fields.get("quantization"):
        faults.append(f"quantization {quantization}: the draft was trained on the states of the target as it is")
    return faults


def unmet(expected: Mapping[str, Any], effective: Mapping[str, Any]) -> list[str]:
    """Settings that did not take: asked for, and reported otherwise or not at all."""
    absent = object()
    faults: list[str] = []
    for name, asked in expected.items():
        got = effective.get(name, absent)
        if got is absent:
            faults.append(f"{name}: {asked!r} was asked for, and the server reports no such setting")
        elif not _same(asked, got):
            faults.append(f"{name}: {asked!r} was asked for, {got!r} is in effect")
    return faults


def _same(asked: Any, got: Any) -> bool:
    if isinstance(asked, bool) or asked is None:
        return bool(asked) == bool(got)
    if isinstance(asked, float) and isinstance(got, int | float):
        return abs(asked - got) < 1e-9
    if isinstance(asked, list | tuple) and isinstance(got, list | tuple):
        return list(asked) == list(got)  # type: ignore[reportUnknownArgumentType]
    return str(asked) == str(got)


def differing(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Which of `names` two servers report differently; answers with and without a draft are compared under equal settings."""
    return [f"{n}: {one.get(n)!r} and {other.get(n)!r}" for n in names if one.get(n) != other.get(n)]
