"""A server that is to follow the serving policy: its flags, and what is said when it turned that off."""

from __future__ import annotations

from pathlib import Path

from stages.engines._sglang_checks import unmet
from stages.engines._sglang_launch import arguments
from tests.engines.test_sglang_launch import launch, told

CONFIG = Path("reports/serving/sglang_adaptive.json")


def test_an_adaptive_server_is_told_its_configuration_by_whole_path() -> None:
    said = " ".join(arguments(launch(adaptive=CONFIG, device="cuda").fields(told(cuda_graphs=True))))
    assert f"--speculative-adaptive --speculative-adaptive-config {CONFIG.resolve()}" in said
    assert "--speculative-num-steps 3" in said and "cuda-graph" not in said
    assert "adaptive" not in " ".join(arguments(launch().fields(told())))
    assert "adaptive" not in " ".join(arguments(launch(adaptive=CONFIG, draft=None, draft_steps=0).fields(told())))


def test_on_a_cpu_it_runs_without_decode_graphs_and_both_are_read_back() -> None:
    expected = launch(adaptive=CONFIG).expected(told())
    assert expected["cuda_graph_config.decode.backend"] == "disabled" and expected["speculative_adaptive"] is True


def test_a_server_that_turned_adaptive_off_is_found_out() -> None:
    """As under attention data parallelism, trees and other algorithms: SGLang warns in its log and goes on."""
    asked = launch(adaptive=CONFIG).expected(told())
    assert unmet({"speculative_adaptive": asked["speculative_adaptive"]}, {"speculative_adaptive": False}) == [
        "speculative_adaptive: True was asked for, False is in effect"
    ]
