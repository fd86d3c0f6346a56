"""The table of how each tool writes the points of a target of 61 layers, as a test. One wrong line here serves a wrong draft."""

from __future__ import annotations

import pytest

from stages.capture.dialects import DIALECTS, alternatives, by_points, dialect_of, family_of, layer_ids, points_of
from stages.contracts.errors import EngineError

N = 61
FIRST_ID_DECIDES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite", "glm_moe_dsa")
EVERY_OTHER = ("llama", "qwen3", "glm4", "gpt_oss", "deepseek_v3", "kimi_k2", "kimi_k25", "deepseek_v4")
AS_WRITTEN = [
    *(("eagle", t, (2, 30, 58), (2, 30, 58)) for t in EVERY_OTHER),
    *(
        (tool, t, (1, 29, 57), (2, 30, 58))
        for tool in ("specforge", "torchspec", "nemo_automodel", "model_optimizer")
        for t in EVERY_OTHER
    ),
    *(("vllm", t, (2, 30, 58, 61), (2, 30, 58, 61)) for t in EVERY_OTHER),
    *(("speculators", t, (2, 30, 58, 61), (2, 30, 58, 61)) for t in EVERY_OTHER),
    *(("speculators_legacy", t, (2, 30, 58, 60), (3, 31, 59, 61)) for t in EVERY_OTHER),
    *(("transformers", t, (0, 1, 60), (0, 1, 60)) for t in EVERY_OTHER),
    *(
        ("sglang", t, (1, 29, 57), (2, 30, 58))
        for t in ("llama", "qwen3", "glm4", "qwen3_moe", "gpt_oss", "minimax_m2")
    ),
    *(
        ("sglang", t, (2, 30, 58), (3, 31, 59))
        for t in ("llama", "qwen3", "glm4", "qwen3_moe", "gpt_oss", "minimax_m2")
    ),
    *(("sglang", t, (-1, 2, 30), (0, 3, 31)) for t in ("llama", "qwen3", "glm4", "gpt_oss")),
    *(("sglang", t, (1, 29, 57), (2, 30, 58)) for t in FIRST_ID_DECIDES),
    *(("sglang", t, (2, 30, 58), (2, 30, 58)) for t in FIRST_ID_DECIDES),
    *(("sglang", t, (3, 31, 59), (3, 31, 59)) for t in FIRST_ID_DECIDES),
    *(("sglang", t, (0, 2, 30), (0, 2, 30)) for t in FIRST_ID_DECIDES),
    *(("sglang_before_25454", t, (1, 29, 57), (2, 30, 58)) for t in FIRST_ID_DECIDES),
    *(("sglang_before_25454", t, (2, 30, 58), (3, 31, 59)) for t in FIRST_ID_DECIDES),
    *(("sglang_before_25454", t, (-1, 29, 57), (0, 30, 58)) for t in FIRST_ID_DECIDES),
    ("sglang", "gpt_oss", (30, 45, 61), (30, 45, 61)),
    ("sglang", "kimi_k25", (57, 1, 29), (1, 29, 57)),  # the first id as written decides, not the smallest
    ("sglang", "deepseek_v4", (1, 29, 57), (1, 29, 57)),
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
        ("sglang_before_25454", (2, 30, 58)),
        ("torchspec", (2, 30, 58)),
        ("nemo_automodel", (2, 30, 58)),
        ("model_optimizer", (2, 30, 58)),
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


@pytest.mark.parametrize("dialect", ["sglang", "eagle", "specforge"])
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


@pytest.mark.parametrize("ids", [(2, 30, 61), (-1, 3, 5)])
def test_the_last_entry_of_transformers_is_after_the_norm_and_no_point(ids: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="transformers cannot capture these points") as error:
        points_of(ids, "transformers", "llama", N)
    assert "hidden_states[61], which is hidden_states[-1], comes after the final norm" in error.value.expected


@pytest.mark.parametrize(
    ("tool", "version", "dialect"),
    [
        ("sglang", "0.5.12", "sglang_before_25454"),
        ("sglang", "0.5.12.post1", "sglang_before_25454"),
        ("sglang", "0.4.10.post2", "sglang_before_25454"),
        ("sglang", "0.5.13", "sglang"),
        ("sglang", "v0.5.23", "sglang"),
        ("sglang", None, "sglang"),
        ("speculators", "0.3.0", "speculators_legacy"),
        ("speculators", "0.4.0.1", "speculators_legacy"),
        ("speculators", "0.5.0", "speculators"),
        ("vllm", "0.11.0", "vllm"),
    ],
)
def test_a_tools_version_decides_its_dialect(tool: str, version: str | None, dialect: str) -> None:
    assert dialect_of(tool, version) == dialect


def test_one_config_on_two_versions_of_sglang_means_other_points_for_kimi_and_the_same_for_llama() -> None:
    for version, points in (("0.5.12", (3, 31, 59)), ("0.5.13", (2, 30, 58))):
        assert points_of((2, 30, 58), "sglang", "kimi_k25", N, version) == points
        assert layer_ids(points, "sglang", "kimi_k25", N, version) == (2, 30, 58)
        assert points_of((2, 30, 58), "sglang", "llama", N, version) == (3, 31, 59)


def test_gpt_oss_changed_its_numbering_later() -> None:
    assert points_of((24, 30, 36), "sglang", "gpt_oss", 36, "0.5.17") == (24, 30, 36)
    with pytest.raises(EngineError, match="cannot capture these points"):
        points_of((24, 30, 36), "sglang", "gpt_oss", 36, "0.5.16")
    assert points_of((1, 17, 32), "sglang", "gpt_oss", 36, "0.5.17") == (2, 18, 33)
    assert layer_ids((24, 30, 36), "sglang", "gpt_oss", 36) == (24, 30, 36)


def test_the_name_of_a_model_class_serves_as_well_as_a_model_type() -> None:
    assert points_of((2, 30, 58), "sglang", "DeepseekV3ForCausalLM", N) == (2, 30, 58)
    assert points_of((2, 30, 58), "sglang", "LlamaForCausalLM", N) == (3, 31, 59)


def test_a_version_that_is_no_number_is_refused() -> None:
    with pytest.raises(EngineError, match="This is no version of sglang") as error:
        dialect_of("sglang", "latest")
    assert error.value.got == "'latest'"


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}, "deepseek_v3"),
        ({"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]}, "kimi_k25"),
        ({"model_type": "glm4_moe_lite"}, "glm4_moe_lite"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"model_type": "gpt-oss"}, "gpt_oss"),
        ({}, ""),
    ],
)
def test_the_model_class_is_read_from_the_targets_config(config: dict, family: str) -> None:
    assert family_of(config) == family


def test_ids_that_mean_different_points_are_told_apart_by_who_wrote_them() -> None:
    found = alternatives((2, 30, 58), N, "kimi_k25")
    assert set(found) == set(DIALECTS)
    grouped = by_points(found)
    assert set(grouped) == {(2, 30, 58), (3, 31, 59)}
    assert set(grouped[(2, 30, 58)]) == {"eagle", "sglang", "vllm", "speculators", "transformers"}
    assert set(by_points(alternatives((2, 30, 58), N, "llama"))[(3, 31, 59)]) > {"sglang", "sglang_before_25454"}


def test_a_dialect_that_could_not_capture_the_ids_is_no_alternative() -> None:
    assert set(alternatives((-1, 29, 57), N, "deepseek_v3")) == {
        "sglang_before_25454",
        "specforge",
        "torchspec",
        "nemo_automodel",
        "model_optimizer",
        "speculators_legacy",
    }
    assert set(alternatives((2, 30, 58, 61), N, "llama")) == {"vllm", "speculators"}
    assert by_points(alternatives(None, N))[(3, 31, 59, 61)] == ("speculators_legacy",)
