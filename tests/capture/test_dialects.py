"""The table of how each tool writes the points of a target of 61 layers, as a test. One wrong line here serves a wrong draft."""

from __future__ import annotations

import pytest

from stages.capture.dialects import DIALECTS, layer_ids, points_of
from stages.contracts.errors import EngineError

N = 61
AS_WRITTEN = [
    ("eagle", "llama", (2, 30, 58), (2, 30, 58)),
    ("sglang", "llama", (1, 29, 57), (2, 30, 58)),
    ("sglang", "qwen3", (2, 30, 58), (3, 31, 59)),
    ("sglang", "glm4", (-1, 29, 57), (0, 30, 58)),
    ("sglang_before_25454", "kimi_k2", (1, 29, 57), (2, 30, 58)),
    ("sglang_before_25454", "deepseek_v3", (2, 30, 58), (3, 31, 59)),
    ("sglang", "kimi_k2", (1, 29, 57), (2, 30, 58)),
    ("sglang", "kimi_k25", (2, 30, 58), (2, 30, 58)),
    ("sglang", "deepseek_v3", (3, 31, 59), (3, 31, 59)),
    ("sglang", "deepseek_v2", (0, 29, 57), (0, 29, 57)),
    ("sglang", "glm4_moe_lite", (2, 30, 58), (2, 30, 58)),
    ("sglang", "deepseek_v4", (1, 29, 57), (1, 29, 57)),
    ("specforge", "llama", (1, 29, 57), (2, 30, 58)),
    ("torchspec", "kimi_k2", (1, 29, 57), (2, 30, 58)),
    ("nemo_automodel", "llama", (1, 29, 57), (2, 30, 58)),
    ("model_optimizer", "llama", (1, 29, 57), (2, 30, 58)),
    ("vllm", "kimi_k2", (2, 30, 58), (2, 30, 58)),
    ("speculators", "llama", (2, 30, 58, 61), (2, 30, 58, 61)),
    ("speculators_legacy", "kimi_k2", (2, 30, 58, 60), (3, 31, 59, 61)),
    ("transformers", "llama", (3, 31, 59), (3, 31, 59)),
]


@pytest.mark.parametrize(("dialect", "model_type", "ids", "points"), AS_WRITTEN)
def test_ids_as_written_mean_the_points_really_captured(
    dialect: str, model_type: str, ids: tuple[int, ...], points: tuple[int, ...]
) -> None:
    assert points_of(ids, dialect, model_type, N) == points


@pytest.mark.parametrize(
    ("dialect", "points"),
    [
        ("eagle", (2, 30, 58)),
        ("sglang", (2, 30, 58)),
        ("specforge", (2, 30, 58)),
        ("vllm", (2, 30, 58)),
        ("speculators", (2, 30, 58, 61)),
        ("speculators_legacy", (3, 31, 59, 61)),
    ],
)
def test_defaults_when_no_ids_are_given(dialect: str, points: tuple[int, ...]) -> None:
    assert points_of(None, dialect, "llama", N) == points


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("model_type", ["llama", "kimi_k2", "deepseek_v4"])
@pytest.mark.parametrize("points", [(3, 31, 59), (2, 30, 58), (5, 6, 7)])
def test_ids_written_for_points_are_read_back_as_these_points(
    dialect: str, model_type: str, points: tuple[int, ...]
) -> None:
    assert points_of(layer_ids(points, dialect, model_type, N), dialect, model_type, N) == points


def test_the_same_points_are_other_ids_on_two_engines_and_two_versions_of_one() -> None:
    points = (3, 31, 59)
    assert layer_ids(points, "sglang", "llama") == (2, 30, 58)
    assert layer_ids(points, "vllm", "llama") == (3, 31, 59)
    assert layer_ids(points, "sglang", "kimi_k25") == (3, 31, 59)
    assert layer_ids(points, "sglang_before_25454", "kimi_k25") == (2, 30, 58)


def test_ids_come_ascending_whatever_the_order_of_the_points() -> None:
    assert layer_ids((28, 3, 16), "sglang", "llama") == (2, 15, 27)


def test_sglang_drops_doubles_of_its_default_in_a_shallow_target() -> None:
    assert points_of(None, "sglang", "llama", 6) == (2, 3)


def test_a_first_point_of_one_cannot_be_written_for_deepseek_in_sglang() -> None:
    with pytest.raises(EngineError, match="cannot be told to capture these points") as error:
        layer_ids((1, 30, 58), "sglang", "deepseek_v3", N)
    assert error.value.got == "[1, 30, 58] means [2, 31, 59]" and "must not be 1" in error.value.do


@pytest.mark.parametrize("dialect", ["sglang", "eagle", "transformers", "specforge"])
def test_the_last_point_is_out_of_reach_of_most_tools(dialect: str) -> None:
    with pytest.raises(EngineError, match="cannot capture these points") as error:
        layer_ids((2, 30, N), dialect, "llama", N)
    assert "61 before the final norm is out of its reach" in error.value.expected and error.value.got == "[61]"


def test_an_id_that_names_no_point_is_refused() -> None:
    with pytest.raises(EngineError, match="vllm cannot capture"):
        points_of((-1, 3, 5), "vllm", "llama", N)


def test_an_unknown_dialect_lists_those_there_are() -> None:
    with pytest.raises(EngineError, match="No dialect 'tgi'") as error:
        layer_ids((2, 3, 4), "tgi", "llama")
    assert "sglang_before_25454" in error.value.expected
