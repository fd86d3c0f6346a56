"""params.yaml and the sets beside it: all load, all faults are told, and the default is the one shipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from stages.contracts.errors import ParamsError
from stages.contracts.params import load_params

ROOT = Path(__file__).resolve().parents[1]
SETS = sorted((ROOT / "params").glob("*.yaml"))


def changed(tmp_path: Path, **sections: dict) -> Path:
    raw = yaml.safe_load((ROOT / "params/smollm2-135m.yaml").read_text())
    for section, keys in sections.items():
        raw[section] |= keys
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "params.yaml"


def test_the_sets_that_the_documents_name_are_there() -> None:
    names = {"kimi-k2.5", "llama-3.1-8b", "qwen3-8b", "smollm2-135m", "smollm2-135m-1000"}
    assert {p.name.removesuffix(".yaml") for p in SETS} >= names


@pytest.mark.parametrize("path", SETS, ids=lambda p: p.stem)
def test_each_set_loads_and_its_points_are_within_the_target(path: Path) -> None:
    params = load_params(path)
    assert list(params.capture.points) == sorted(set(params.capture.points))
    assert params.capture.points[0] > 0 and params.capture.points[-1] < params.target.layers
    assert params.train.heads * params.train.head_dim > 0
    assert set(params.gates.deployment.min_domain_accept_length) == {s.domain for s in params.prepare.sources}


@pytest.mark.parametrize("path", SETS, ids=lambda p: p.stem)
def test_each_set_has_the_default_sets_keys_and_a_comment_on_every_number(path: Path) -> None:
    default = yaml.safe_load((ROOT / "params/smollm2-135m.yaml").read_text())
    raw = yaml.safe_load(path.read_text())
    assert {s: set(raw[s]) for s in raw} == {s: set(default[s]) for s in default}
    for line in path.read_text().splitlines():
        value = line.partition(": ")[2]
        if value and value[0].isdigit() and not line.lstrip().startswith(("-", "#")):
            assert "#" in value, f"{path.name}: {line.strip()} says no unit or range"


@pytest.mark.parametrize(
    ("name", "layers", "hidden_size", "vocab_size", "points"),
    [
        ("llama-3.1-8b", 32, 4096, 128256, (2, 16, 29)),
        ("qwen3-8b", 36, 4096, 151936, (2, 18, 33)),
        ("kimi-k2.5", 61, 7168, 163840, (3, 31, 59)),
        ("smollm2-135m-1000", 30, 576, 49152, (3, 16, 28)),
    ],
)
def test_the_sets_describe_their_targets(
    name: str, layers: int, hidden_size: int, vocab_size: int, points: tuple[int, ...]
) -> None:
    params = load_params(ROOT / f"params/{name}.yaml")
    target = params.target
    assert (target.layers, target.hidden_size, target.vocab_size) == (layers, hidden_size, vocab_size)
    assert params.capture.points == points


def test_kimis_ten_sources_and_draft_are_as_its_users_know_them() -> None:
    params = load_params(ROOT / "params/kimi-k2.5.yaml")
    names = "A1_deepswekimi A2_kimik25 B1_glaive B2_opencodeinstruct B3_magicoder B4_mixturethoughts B5_openthoughts"
    assert [s.name for s in params.prepare.sources] == [*names.split(), "B6_ultrachat", "B7_sharegpt", "B8_sweagent"]
    assert {s.name[0]: s.answers for s in params.prepare.sources} == {"A": "given", "B": "regenerate"}
    train = params.train
    assert (train.heads, train.kv_heads, train.head_dim, train.intermediate_size) == (64, 64, 128, 12288)
    assert params.merge.draft_vocab_size == 32000 and params.serve.engine == "sglang"


def test_the_larger_set_has_about_a_thousand_prompts_of_the_same_target() -> None:
    default, larger = (load_params(ROOT / f"params/smollm2-135m{s}.yaml") for s in ("", "-1000"))
    assert larger.target == default.target and larger.capture == default.capture
    assert 950 <= sum(s.limit for s in larger.prepare.sources) <= 1100


def test_the_default_is_the_set_shipped_under_its_name() -> None:
    sets = {path.stem: path.read_bytes() for path in (ROOT / "params").glob("*.yaml")}
    assert (ROOT / "params.yaml").read_bytes() in sets.values(), (
        "edit the set in params/, then `make use PARAMS=<name>`"
    )


def test_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"1 fault\b[\s\S]*train.optimiser_steps: Extra inputs"):
        load_params(changed(tmp_path, train={"optimiser_steps": 3}))


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ParamsError) as error:
        load_params(changed(tmp_path, train={"steps_ahead": 0, "speed": 1}, prepare={"capped": "perhaps"}))
    text = error.value.text()
    assert "3 faults" in text
    for key in ("train.steps_ahead", "train.speed", "prepare.capped"):
        assert key in text


def test_sections_that_contradict_each_other_are_told_together(tmp_path: Path) -> None:
    path = changed(tmp_path, capture={"points": [0, 16, 30]}, prepare={"max_row_tokens": 100}, train={"kv_heads": 2})
    with pytest.raises(ParamsError) as error:
        load_params(path)
    for words in ("0 is the embedding output", "30 is the last point", "max_row_tokens 100 is below", "kv_heads 2"):
        assert words in error.value.text()


def test_a_missing_file_and_one_that_is_no_yaml_are_told(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"No params.yaml here[\s\S]*repository root"):
        load_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("target: [")
    with pytest.raises(ParamsError, match="is not YAML"):
        load_params(tmp_path / "params.yaml")
