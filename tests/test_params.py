"""params.yaml and the sets beside it: all load, all faults are told, and the default is the one shipped."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("path", SETS, ids=lambda p: p.stem)
def test_dvc_can_read_each_set(path: Path) -> None:
    """DVC writes values to dvc.lock and refuses what YAML makes of a bare 2026-01-01."""

    def kinds(value: object) -> set[type]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return {type(value)}.union(*map(kinds, parts))

    assert kinds(yaml.safe_load(path.read_text())) <= {dict, list, str, int, float, bool, type(None)}


def test_a_bare_date_is_refused_with_the_words_that_mend_it(tmp_path: Path) -> None:
    text = (ROOT / "params.yaml").read_text()
    assert "    date: null  " in text
    (tmp_path / "params.yaml").write_text(text.replace("    date: null  ", "    date: 2026-01-01  "))
    with pytest.raises(ParamsError, match="write '2026-01-01', in quotes"):
        load_params(tmp_path / "params.yaml")


def test_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ParamsError, match=r"1 fault\b[\s\S]*train.optimiser_steps: no such key; is optimizer_steps meant\?"
    ):
        load_params(changed(tmp_path, train={"optimiser_steps": 3}))


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("train", {"kv_heads": 3.5}, "train.kv_heads: a whole number is needed (got 3.5)"),
        ("train", {"learning_rate": "fast"}, "train.learning_rate: a number is needed (got 'fast')"),
        (
            "train",
            {"norms": ["fc_norms"]},
            "train.norms.0: must be one of fc_norm, norm_before_fc or norm_output (got 'fc_norms')",
        ),
        ("train", {"norms": "fc_norm"}, "train.norms: a list is needed (got 'fc_norm')"),
        (
            "train",
            {"norms": ["fc_norm", "norm_before_fc"]},
            "train.norms has fc_norm and norm_before_fc: one norms each state, the other all three as one",
        ),
        ("train", {"head": "cold"}, "train.head: must be one of trained or frozen (got 'cold')"),
        ("benchmark", {"repeats": 2}, "benchmark.repeats: must be at least 3 (got 2)"),
        ("capture", {"points": [3, 16]}, "capture.points: at least 3 are needed, 2 are there (got [3, 16])"),
        ("serve", {"sglang": 3}, "serve.sglang: a section is needed, as {key: value} (got 3)"),
    ],
)
def test_a_rule_is_told_with_what_was_found(
    tmp_path: Path, section: str, change: dict[str, object], words: str
) -> None:
    assert faults(changed(tmp_path, **{section: change})) == [words]


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    text = (ROOT / "params/smollm2-135m.yaml").read_text()
    path = tmp_path / "params.yaml"
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("  steps_ahead")))
    assert faults(path) == ["train.steps_ahead: missing"]


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


def faults(path: Path) -> list[str]:
    """The faults told of `path`, a line each."""
    with pytest.raises(ParamsError) as error:
        load_params(path)
    return [line.strip() for line in error.value.got.strip().split("\n")]


def test_faults_within_and_between_sections_are_told_together_a_line_each(tmp_path: Path) -> None:
    found = faults(
        changed(tmp_path, capture={"points": [0, 16, 30]}, train={"kv_heads": 2}, serve={"draft_steps": 0, "speed": 1})
    )
    assert [line.partition(" ")[0] for line in found] == [
        "serve.draft_steps:",
        "serve.speed:",
        "capture.points",
        "train.heads",
    ]
    assert "0 is the embedding output" in found[2] and "30 is the last point" in found[2]
    assert not any("where:" in line or "Value error" in line for line in found)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "optimizer_steps", True),
        ("train", "optimizer_steps", "480"),
        ("train", "optimizer_steps", 480.0),
        ("train", "learning_rate", True),
        ("train", "seed", -1),
        ("train", "seed", 2**31),
        ("prepare", "seed", 2**40),
        ("target", "threads", 4097),
        ("capture", "points", [3, "16", 28]),
        ("benchmark", "draft_steps", [1, 17]),
        ("benchmark", "draft_steps", [0]),
    ],
)
def test_values_of_another_kind_or_out_of_range_are_refused_by_name(
    tmp_path: Path, section: str, key: str, value: object
) -> None:
    found = faults(changed(tmp_path, **{section: {key: value}}))
    assert all(fault.startswith(f"{section}.{key}") for fault in found)


@pytest.mark.parametrize("concurrencies", [[4, 2], [1, 1, 2]])
def test_concurrencies_ascend_and_differ(tmp_path: Path, concurrencies: list[int]) -> None:
    (fault,) = faults(changed(tmp_path, benchmark={"concurrencies": concurrencies}))
    assert "are not ascending and distinct" in fault


def test_a_whole_number_is_good_where_a_fraction_may_stand(tmp_path: Path) -> None:
    path = changed(tmp_path, train={"step_decay": 1, "learning_rate": "1e-4"}, prepare={"temperature": 0})
    assert load_params(path).train.step_decay == 1.0 and load_params(path).train.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "prepared.json"}, "prepare.sources.0.name: must look like ^[A-Za-z0-9]"),
        ({"name": "out_of_distribution.parquet"}, "prepare.sources.0.name: must look like ^[A-Za-z0-9]"),
        ({"name": "../up"}, "prepare.sources.0.name: must look like ^[A-Za-z0-9]"),
        ({"name": "x" * 65}, "prepare.sources.0.name: String should have at most 64"),
        (
            {"name": "STDLIB"},
            "prepare: source names are doubled, upper and lower case taken as one: ['STDLIB', 'stdlib']",
        ),
        ({"domain": " "}, "prepare.sources.0.domain: a domain needs a name"),
        ({"domain": "out_of_distribution"}, "prepare.sources.0.domain: a domain needs a name"),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, dict) else "",
)
def test_sources_whose_names_would_collide_are_refused(tmp_path: Path, change: dict[str, str], words: str) -> None:
    sources = yaml.safe_load((ROOT / "params/smollm2-135m.yaml").read_text())["prepare"]["sources"]
    sources[0] |= change
    (fault,) = faults(changed(tmp_path, prepare={"sources": sources}))
    assert fault.startswith(words)


def test_doubled_keys_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    text = (ROOT / "params/smollm2-135m.yaml").read_text()
    path.write_text(text.replace("  step_decay:", "  seed: 2\n  step_decay:") + "merge: {draft_vocab_size: 1}\n")
    with pytest.raises(ParamsError, match="has 2 doubled keys") as error:
        load_params(path)
    assert re.fullmatch(r"train\.seed in lines \d+ and \d+; merge in lines \d+ and \d+", error.value.got)
    path.write_text("a: &a {b: *a}\n")  # an anchor within itself ends too
    with pytest.raises(ParamsError, match="faults"):
        load_params(path)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "params.yaml is empty"),
        (b"# nothing but a remark\n", "params.yaml is empty"),
        (b"- 1\n", "does not hold sections"),
        ("name: caf\u00e9\n".encode("latin-1"), "is not UTF-8"),
        (b"when: 2026-13-45\n", "is not YAML"),
        (b"[" * 5000, "is not YAML"),
        (b"a: \x00\n", "is not YAML"),
    ],
    ids=["empty", "remark", "list", "latin-1", "date", "deep", "nul"],
)
def test_bytes_that_hold_no_sections_are_told_plainly(tmp_path: Path, data: bytes, what: str) -> None:
    (tmp_path / "params.yaml").write_bytes(data)
    with pytest.raises(ParamsError, match=what):
        load_params(tmp_path / "params.yaml")
