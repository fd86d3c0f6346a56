"""The SGLang launch: a command made of params and record, and every misfit refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.contracts.errors import EngineError
from stages.contracts.params import SGLang
from stages.engines._sglang_checks import DraftFacts, check_launch, differing, unmet
from stages.engines._sglang_launch import Launch, arguments, command, environment

ROOT = Path(__file__).resolve().parents[2]
DRAFT = DraftFacts(
    folder=Path("models/draft"),
    architecture="LlamaForCausalLMEagle3",
    tied_embeddings=False,
    vocab_size=1000,
    draft_vocab_size=200,
    max_positions=2048,
    points=(3, 16, 28),
    served_points=(3, 16, 28),
    compute_dtype="float32",
)


def told(**values: Any) -> SGLang:
    raw = yaml.safe_load((ROOT / "params/smollm2-135m.yaml").read_text())["serve"]["sglang"]
    return SGLang.model_validate(raw | values)


def launch(**values: Any) -> Launch:
    how: dict[str, Any] = {
        "target": Path("/target"), "device": "cpu", "dtype": "float32", "threads": 2, "concurrency": 8, "positions": 400,
        "draft": DRAFT, "draft_steps": 3,
    }  # fmt: skip
    return Launch(**(how | values))


def check(draft: DraftFacts | None = DRAFT, positions: int = 400, by_value: bool = False, **fields: Any) -> list[str]:
    return check_launch(launch().fields(told()) | fields, draft, positions=positions, by_value=by_value)


def test_the_command_says_all_that_params_and_record_say(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to("/bin/sh")
    said = command(launch().fields(told()), str(python), 30001)
    line = " ".join(said)
    assert said[:4] == [str(python), "-P", "-m", "sglang.launch_server"]
    assert "--host 127.0.0.1 --port 30001" in line
    for part in (
        "--model-path /target", "--device cpu", "--dtype float32", "--attention-backend intel_amx", "--context-length 1024",
        "--max-total-tokens 8192", "--max-running-requests 8", "--disable-radix-cache", "--enable-return-hidden-states",
        "--speculative-algorithm EAGLE3", f"--speculative-draft-model-path {Path('models/draft').resolve()}",
        "--speculative-num-steps 3", "--speculative-eagle-topk 1", "--speculative-num-draft-tokens 4",
    ):  # fmt: skip
        assert part in line, part
    assert not check()


def test_without_a_draft_nothing_is_speculated_and_all_else_is_alike() -> None:
    with_draft, plain = launch().fields(told()), launch(draft=None, draft_steps=0).fields(told())
    assert {n: v for n, v in with_draft.items() if not n.startswith("speculative")} == plain


def test_many_gpus_pass_through() -> None:
    settings = told(
        tensor_parallel=8, expert_parallel=8, data_parallel=2, attention_data_parallel=4, nodes=2, node_rank=1,
        rendezvous="10.0.0.1:5000", memory_fraction=0.85, cuda_graphs=False, attention_backend="fa3", nccl_nvls=True,
        custom_all_reduce=False, trust_remote_code=True, moe_a2a_backend="deepep", max_total_tokens=0, kv_cache_dtype="fp8_e4m3",
    )  # fmt: skip
    line = " ".join(arguments(launch(device="cuda", dtype="bfloat16").fields(settings)))
    for part in (
        "--tp-size 8", "--ep-size 8", "--dp-size 2", "--attn-dp-size 4", "--nnodes 2", "--node-rank 1",
        "--dist-init-addr 10.0.0.1:5000", "--mem-fraction-static 0.85", "--cuda-graph-backend-decode disabled",
        "--attention-backend fa3", "--enable-nccl-nvls", "--disable-custom-all-reduce", "--trust-remote-code",
        "--moe-a2a-backend deepep", "--kv-cache-dtype fp8_e4m3",
    ):  # fmt: skip
        assert part in line, part
    assert "--max-total-tokens" not in line and "--sleep-on-idle" not in line


def test_capturing_needs_no_draft_and_expects_no_speculation() -> None:
    capture = launch(draft=None, draft_steps=0, capture_ids=(2, 15, 27))
    line = " ".join(arguments(capture.fields(told())))
    assert "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3" in line
    assert "--return-aux-hidden-state-layer-ids 2 15 27" in line and "draft" not in line
    assert capture.expected(told())["speculative_algorithm"] is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"speculative_algorithm": "EAGLE"},
            "speculative_algorithm EAGLE with a draft of class LlamaForCausalLMEagle3",
        ),
        ({"speculative_draft_model_path": None}, "no speculative_draft_model_path"),
        ({"speculative_num_draft_tokens": 8}, "8: a chain .topk 1. of 3 steps verifies 4 tokens"),
        ({"speculative_num_steps": 0}, "speculative_num_steps 0 and speculative_eagle_topk 1"),
        ({"dtype": "bfloat16"}, "dtype bfloat16: the states the draft was trained on were computed in float32"),
        ({"quantization": "fp8"}, "quantization fp8: the draft was trained on the states of the target as it is"),
        ({"context_length": 300}, "context_length 300 .context_tokens.: the longest request has 400 tokens"),
        ({"context_length": 4096}, "context_length 4096: the draft's max_position_embeddings is 2048"),
    ],
)
def test_a_setting_under_which_the_draft_cannot_work_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        check(**fields)


def test_tied_embeddings_with_a_small_vocabulary_are_refused() -> None:
    with pytest.raises(EngineError, match="tie_word_embeddings is true with a draft vocabulary of 200 out of 1000"):
        check(replace(DRAFT, tied_embeddings=True))


def test_a_request_longer_than_the_draft_reaches_is_refused() -> None:
    short = replace(DRAFT, max_positions=64)
    assert not check(short, positions=64, context_length=64)
    with pytest.raises(EngineError, match="context_length 80: the draft's max_position_embeddings is 64"):
        check(short, positions=80, context_length=None)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(EngineError) as error:
        check(speculative_algorithm="EAGLE", speculative_num_draft_tokens=8, dtype="bfloat16")
    assert error.value.got.count("\n") == 3


def test_other_layers_are_refused_or_left_to_parity_with_a_warning() -> None:
    bug = replace(DRAFT, served_points=(0, 3, 16))
    words = r"feed points \[0, 3, 16\], and it was trained on \[3, 16, 28\]"
    with pytest.raises(EngineError, match=words):
        check(bug)
    (warning,) = check(bug, by_value=True)
    assert "feed points [0, 3, 16]" in warning


def test_a_setting_that_did_not_take_is_named() -> None:
    asked = launch().expected(told())
    assert unmet(asked, asked | {"more": 1}) == []
    effective = asked | {"attention_backend": "torch_native", "speculative_algorithm": None}
    effective.pop("context_length")
    assert unmet(asked, effective) == [
        "context_length: 1024 was asked for, and the server reports no such setting",
        "attention_backend: 'intel_amx' was asked for, 'torch_native' is in effect",
        "speculative_algorithm: 'EAGLE3' was asked for, None is in effect",
    ]


def test_cuda_graphs_switched_off_are_looked_for_where_the_server_reports_them() -> None:
    asked = launch(device="cuda", dtype="bfloat16").expected(told(cuda_graphs=False))
    parts = {name: value for name, value in asked.items() if "graph" in name}
    assert parts == {"cuda_graph_config.decode.backend": "disabled", "cuda_graph_config.prefill.backend": "disabled"}
    effective = {"cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}}}
    assert unmet(parts, effective) == [
        "cuda_graph_config.decode.backend: 'disabled' was asked for, 'full' is in effect"
    ]


def test_servers_that_are_not_alike_are_told_apart() -> None:
    one = {"dtype": "bfloat16", "max_running_requests": 8}
    assert differing(one, one | {"max_running_requests": 64}, ("dtype", "max_running_requests")) == [
        "max_running_requests: 8 and 64"
    ]


def test_no_interpreter_is_told_with_what_to_do() -> None:
    with pytest.raises(EngineError, match="make sglang"):
        command({}, "nowhere/bin/python", 1)


def test_the_child_does_not_inherit_this_environment_s_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    env = environment("cpu", 2)
    assert "PYTHONPATH" not in env and env["OMP_NUM_THREADS"] == "2" and env["HF_HUB_OFFLINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in environment("cuda", 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"url": "http://127.0.0.1:1"}, "`url` and `plain_url` come together"),
        ({"url": "here", "plain_url": "there"}, "does not start with http"),
        ({"node_rank": 1}, "node_rank 1 of 1 nodes"),
        ({"nodes": 2}, "`rendezvous`, host:port of node 0, is needed"),
    ],
)
def test_settings_that_contradict_each_other_are_no_params(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        told(**values)
