"""A glance at hidden states of other tools: every kind, every fault, from listings, configs and one sample's shapes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages import glance
from stages.glancing.contents import Shape
from stages.glancing.folders import _bytes
from stages.glancing.told import Told
from tests.glancing import stores


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No params.yaml here that could tell a target's depth."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(told: Told, level: str) -> str:
    return "\n".join(f"{n.words} [{n.where}] {n.do}" for n in told.notes if n.level == level)


def test_a_whole_store_of_the_users_has_no_fault_and_says_all_of_itself(tmp_path: Path) -> None:
    stores.legacy(tmp_path / "s/rows_0-4")
    stores.legacy(tmp_path / "s/rows_4-8")
    told = glance.look(tmp_path / "s")
    facts = told.facts
    assert told.kind == "hidden_states" and told.what == "hidden states of speculators 0.4.1" and not told.faults
    assert (facts["rows"], facts["folders"], facts["tokens"], facts["rows_missing"]) == (8, 2, 8 * stores.TOKENS, 0)
    assert facts["ranges"] == [[0, 8]] and facts["tokens_are"] == "by sample_lengths.json"
    assert facts["bytes"] == sum(p.stat().st_size for p in (tmp_path / "s").rglob("*.pt"))
    assert facts["layer_ids"] == [2, 30, 58, 60] and facts["points"] == [3, 31, 59] and facts["last_point"] == 61
    assert facts["layers"] == 61 and facts["layers_known_from"] == "its last id 60 is the last layer, counted from 0"
    assert (facts["dtype"], facts["hidden_size"], facts["last_state"]) == ("bfloat16", stores.H, "before_final_norm")
    assert facts["target"] == "moonshotai/Kimi-K2.5" and facts["source"] == "chats.jsonl" and not facts["ambiguous"]
    assert "Each point is +1 from EAGLE's usual 2, 30, 58" in words(told, "note")
    assert (
        told.next[0].endswith("--deep") and "capture.adopt:" in told.next[1] and "adopt_layer_ids" not in told.next[1]
    )


@pytest.mark.parametrize(
    ("make", "what", "facts"),
    [
        (lambda d: stores.specforge(d / "rows_0-4", range(4)), "SpecForge, version", {"rows": 4, "last_state": "after_final_norm", "points_if_default": None}),
        (lambda d: stores.specforge(d / "rows_0-4", range(4), True), "SpecForge, version", {"rows": 4, "tokens": None, "states_in_a_row": 4}),
        (lambda d: stores.speculators(d, range(3)), "speculators ≥ 0.5, version", {"rows": 3, "tokens": 36, "last_state": "before_final_norm"}),
        (lambda d: stores.angelslim(d / "rows_0-5000", range(3)), "AngelSlim, version", {"rows": 3, "last_state": "after_final_norm"}),
        (lambda d: stores.model_optimizer(d, ["a", "b"]), "Model-Optimizer, version", {"rows": 2, "last_state": "unknown", "states_in_a_row": 4}),
        (lambda d: stores.automodel(d, range(3)), "NeMo Automodel format 2", {"rows": 10, "shards": 3, "points": [2, 16, 29], "layer_ids": [1, 15, 28]}),
    ],
)  # fmt: skip
def test_each_tools_store_is_named_and_counted(
    tmp_path: Path, make: Callable[[Path], Path], what: str, facts: dict[str, Any]
) -> None:
    make(tmp_path / "s")
    told = glance.look(tmp_path / "s")
    assert told.what.startswith(f"hidden states of {what}") and not told.faults
    assert {k: told.facts[k] for k in facts} == facts
    assert told.facts["hidden_size"] == stores.H and told.facts["dtype"] == "bfloat16"


def make_gap(root: Path) -> None:
    stores.legacy(root / "rows_0-4")
    stores.legacy(root / "rows_8-12")


def make_overlap(root: Path) -> None:
    stores.legacy(root / "rows_0-4")
    stores.legacy(root / "rows_2-6")


def make_crashed(root: Path) -> None:
    stores.legacy(root / "rows_0-4")
    stores.legacy(root / "rows_4-14", [0, 1, 4, 5, 6], {}, lengths=False)


def make_cut(root: Path) -> None:
    stores.legacy(root / "rows_0-4", tokens=400)
    path = root / "rows_0-4/data_2.pt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])


def make_empty(root: Path) -> None:
    stores.legacy(root)
    (root / "data_0.pt").write_bytes(b"")


def make_first_cut(root: Path) -> None:
    stores.legacy(root, [0])
    (root / "data_0.pt").write_bytes((root / "data_0.pt").read_bytes()[:900])


def make_doubled(root: Path) -> None:
    stores.legacy(root)
    stores.legacy_sample(root / "data_03.pt")


def make_other_layers(root: Path) -> None:
    stores.legacy(root / "rows_0-4")
    stores.legacy(root / "rows_4-8", config=stores.legacy_config(layer_ids=[1, 29, 57, 60]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_gap, "No folder has rows 4–7 [] extract rows_4-8"),
        (make_overlap, "rows_0-4 and rows_2-6 both claim rows 2–3"),
        (make_crashed, "No data_config.json in 1 of 2 folders: these runs did not end [rows_4-14]"),
        (make_crashed, "2 holes: 2–3. A resumed run goes on after its highest number, so they stay [rows_4-14]"),
        (make_cut, "1 file smaller than sample_lengths.json says: cut off, or of fewer states: data_2.pt [rows_0-4]"),
        (make_empty, "1 file of zero bytes: data_0.pt"),
        (make_first_cut, "The sample opened cannot be read: an archive without its end: cut off [data_0.pt]"),
        (make_doubled, "1 number with more than one file: data_"),
        (make_other_layers, "Runs differ in layer ids: [2, 30, 58, 60] in rows_0-4; [1, 29, 57, 60] in rows_4-8"),
        (lambda d: stores.legacy(d, config={}), "No data_config.json: the run did not end, or the file was left behind"),
        (lambda d: stores.legacy(d, range(3), stores.legacy_config(num_samples=9)), "6 rows fewer than its data_config.json says (9)"),
        (lambda d: stores.legacy(d, config=stores.legacy_config(layer_ids=[2, 30, 58]), count=3), "3 states a row instead of four: the last one is missing, and speculators' own reader takes slot 2 for it"),
        (lambda d: stores.legacy(d, count=3), "4 layer ids are written and a row holds 3 states"),
        (lambda d: stores.legacy(d, mask=False), "The sample has no loss mask"),
        (lambda d: stores.legacy(d, width=16), "The sample's states are 16 wide, data_config.json says 8"),
        (lambda d: stores.legacy(d, config=stores.legacy_config(layer_ids=[-1, 30, 58, 60])), "An auxiliary state is the embedding output (point 0)"),
        (lambda d: stores.legacy(d, config=stores.legacy_config(layer_ids=[30, 30, 58, 60])), "Ids [30, 30, 58, 60] are doubled: 3 captures for 4 ids"),
        (lambda d: stores.legacy(d / "rows_0-4", [0, 1, 2, 9]), "Numbers outside the folder's range: 9 [rows_0-4]"),
        (lambda d: stores.specforge(d / "rows_0-4", [0, 1, 3]), "1 hole: 2 [rows_0-4]"),
        (lambda d: stores.automodel(d, [0, 2]), "1 hole: 1"),
        (lambda d: stores.automodel(d, [0, 1]), "1 shard fewer than its manifest.json says (3)"),
    ],
)  # fmt: skip
def test_a_fault_is_named_where_it_is(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    make(tmp_path / "s")
    told = glance.look(tmp_path / "s")
    assert said in words(told, "fault")
    assert any(n["level"] == "fault" for n in told.as_json()["notes"])


def test_a_manifest_without_a_shard_and_a_norm_that_cannot_be_undone_are_told(tmp_path: Path) -> None:
    told = glance.look(stores.automodel(tmp_path / "a", []))
    assert told.facts["rows"] == 0 and "The sample opened cannot be read: there is none" in words(told, "fault")
    told = glance.look(stores.specforge(tmp_path / "b", range(3)))
    assert "extract cannot adopt this store" in words(told, "note") and not any("adopt" in step for step in told.next)


def test_a_config_that_is_no_json_and_one_of_odd_types_are_told(tmp_path: Path) -> None:
    stores.legacy(tmp_path / "s")
    (tmp_path / "s/data_config.json").write_text('{"version": "2.0", ')
    assert "This config cannot be read" in words(glance.look(tmp_path / "s"), "fault")
    odd = {"version": 2, "model": [], "data": {"num_samples": "4"}, "hidden_states": {"layer_ids": "2,30"}}
    (tmp_path / "s/data_config.json").write_text(json.dumps(odd))
    told = glance.look(tmp_path / "s")
    assert told.facts["layer_ids"] is None and told.facts["rows"] == 4


def test_lengths_and_files_are_held_against_each_other(tmp_path: Path) -> None:
    folder = stores.legacy(tmp_path / "s")
    (folder / "sample_lengths.json").write_text(json.dumps({"0": 12, "1": 12, "2": 12, "7": 12}))
    told = glance.look(folder)
    assert "sample_lengths.json has 1 row without a file" in words(told, "fault")
    assert "1 file without an entry in sample_lengths.json" in words(told, "risk")


def test_numbers_may_count_from_the_folders_start_or_over_all_rows(tmp_path: Path) -> None:
    stores.legacy(tmp_path / "s/rows_0-4")
    stores.legacy(tmp_path / "s/rows_4-8", range(4, 8))
    told = glance.look(tmp_path / "s")
    assert told.facts["rows"] == 8 and told.facts["rows_missing"] == 0 and told.facts["rows_doubled"] == 0
    assert not told.faults


def test_a_reader_that_sorts_names_is_warned_of(tmp_path: Path) -> None:
    stores.legacy(tmp_path / "s/rows_2-6")
    stores.legacy(tmp_path / "s/rows_10-14")
    assert "Sorted as text, rows_10-14 comes before rows_2-6" in words(glance.look(tmp_path / "s"), "risk")


def test_files_that_are_no_sample_are_told_with_their_square_brackets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stores.legacy(tmp_path / "s[/b]")
    (folder / "notes[i].txt").write_text("x")
    (folder / "data_9.pt.tmp").write_text("x")
    told = glance.look(folder)
    assert told.facts["no_samples"] == {"count": 2, "first": ["data_9.pt.tmp", "notes[i].txt"]}
    assert "1 file of a write that did not end: data_9.pt.tmp" in words(told, "risk")
    glance.show_path(told, as_json=False)
    shown = "".join(capsys.readouterr().out.split())
    assert "s[/b]" in shown and "notes[i].txt" in shown


def test_a_name_that_is_no_text_or_would_command_the_terminal_is_shown_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stores.legacy(tmp_path / "s")
    (folder / "red\x1b[31m.txt").write_text("x")
    (folder / os.fsdecode(b"latin\xff.txt")).write_text("x")
    told = glance.look(folder)
    glance.show_path(told, as_json=False)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "red\ufffd[31m.txt" in shown and "latin\ufffd.txt" in shown
    glance.show_path(told, as_json=True)
    assert json.loads(capsys.readouterr().out)["facts"]["no_samples"]["count"] == 2


@pytest.mark.parametrize(
    ("version", "command", "level", "said"),
    [
        ("0.4.0", "x --batch-size 16", "fault", "0.4.0 in batches of 16: 14 of every 16 rows carry another row's loss mask"),
        ("0.4.0.1", "x --batch-size=12", "fault", "0.4.0.1 in batches of 12: 10 of every 12 rows"),
        ("0.4.0", "x --batch-size 10", "fine", "ruled out: it ran batches of 10"),
        ("0.4.0.1", "x", "fine", "ruled out: it ran batches of 8, its default"),
        ("0.4.0", None, "risk", "the command is not recorded, so the batch is not known"),
        ("0.3.0", "x --batch-size 8", "risk", "0.3.0 could pair a row with another request's states"),
        ("0.3.0", "x --batch-size 1", "fine", "this run had one row a batch"),
        ("0.4.0.dev32", "x", "risk", "0.4.0.dev32 could pair a row"),
        ("0.5.1", "x", "risk", "laid out as speculators 0.3-0.4 writes them, the config says 0.5.1"),
    ],
)  # fmt: skip
def test_a_versions_faults_are_said_or_ruled_out(
    tmp_path: Path, version: str, command: str | None, level: str, said: str
) -> None:
    stores.legacy(tmp_path / "s", config=stores.legacy_config(version=version, command=command))
    assert said in words(glance.look(tmp_path / "s"), level)


def test_a_sound_version_has_none_of_the_faults_of_others(tmp_path: Path) -> None:
    stores.legacy(tmp_path / "s", config=stores.legacy_config(version="0.4.1", command="x --batch-size 32"))
    told = glance.look(tmp_path / "s")
    assert not told.faults and "mask" not in words(told, "risk") and "pair" not in words(told, "risk")


def test_batches_that_pass_one_prefill_are_counted(tmp_path: Path) -> None:
    config = stores.legacy_config(version="0.3.0", command="x --batch-size 2", max_model_len=9000)
    folder = stores.legacy(tmp_path / "s", config=config, lengths=False)
    (folder / "sample_lengths.json").write_text(json.dumps({"0": 5000, "1": 5000, "2": 10, "3": 10}))
    assert "1 of 2 batches pass 8192 tokens, so theirs was" in words(glance.look(folder), "risk")


def test_rows_cut_at_the_models_limit_are_counted(tmp_path: Path) -> None:
    stores.legacy(tmp_path / "s", config=stores.legacy_config(max_model_len=stores.TOKENS + 1))
    assert f"4 rows are {stores.TOKENS} tokens long, the model's limit" in words(glance.look(tmp_path / "s"), "risk")


def test_without_a_version_neither_fault_is_ruled_out(tmp_path: Path) -> None:
    stores.legacy(tmp_path / "s", config={})
    told = glance.look(tmp_path / "s")
    assert "neither the paired states of 0.3.0 nor the permuted masks of 0.4.0–0.4.0.1 are ruled out" in words(
        told, "risk"
    )
    assert "the points 3, n//2+1, n-2, n of the target's n layers" in words(told, "risk")


def test_ids_whose_writer_is_not_recorded_are_given_in_every_tools_words(tmp_path: Path) -> None:
    config = stores.legacy_config()
    del config["speculators_version"], config["reproducibility"]["package_versions"]
    stores.legacy(tmp_path / "s", config=config)
    facts = glance.look(tmp_path / "s").facts
    other = next(o for o in facts["other_readings"] if o["points"] == [2, 30, 58, 60])
    assert facts["ambiguous"] and "vllm, speculators" in other["if_written_by"]


def test_a_target_whose_folder_is_here_tells_the_depth(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 70}))
    stores.legacy(tmp_path / "s", config=stores.legacy_config(target_model_path=str(tmp_path / "target")))
    told = glance.look(tmp_path / "s")
    assert told.facts["layers"] == 70 and told.facts["layers_known_from"] == "its target's config.json"
    assert "The last state is after layer 61 of 70: it is not the last layer's output" in words(told, "fault")


def test_the_targets_width_in_params_tells_the_depth_of_a_store_without_ids(tmp_path: Path, repo_root: Path) -> None:
    text = (repo_root / "params.yaml").read_text().replace("hidden_size: 576", f"hidden_size: {stores.H}")
    (tmp_path / "params.yaml").write_text(text)
    stores.specforge(tmp_path / "s/rows_0-4", range(4))
    told = glance.look(tmp_path / "s")
    assert told.facts["points_if_default"] == [2, 15, 27] and told.facts["layers"] == 30
    assert "whether it was used is not recorded" in words(told, "risk")


def test_one_sample_is_opened_however_many_there_are(tmp_path: Path) -> None:
    for k in range(3):
        folder = stores.legacy(tmp_path / f"s/rows_{k * 40}-{(k + 1) * 40}", [0], stores.legacy_config(num_samples=40))
        for i in range(1, 40):
            os.link(folder / "data_0.pt", folder / f"data_{i}.pt")
    opened: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str) and str(tmp_path) in arguments[0]:
            opened.append(Path(arguments[0]).name)

    sys.addaudithook(hook)
    told = glance.look(tmp_path / "s")
    watching = False
    assert told.facts["rows"] == 120
    assert {n for n in opened if n.endswith(".pt")} == {"data_0.pt"} and opened.count("data_config.json") <= 6


def test_figures_of_thousands_of_digits_and_nested_lists_in_a_store_are_no_reason_to_stop(tmp_path: Path) -> None:
    """Names, versions, batches and keys come from files that anyone may have written."""
    long = "9" * 5000
    folder = stores.legacy(
        tmp_path / "s", range(4), stores.legacy_config(version=long, command=f"x --batch-size {long}")
    )
    (folder / "sample_lengths.json").write_text(json.dumps({long: 5, "²": 6, "0": 7}))
    nested: list[object] = []
    for _ in range(5000):
        nested = [nested]
    assert glance.look(folder).kind == "hidden_states"
    (folder / "data_config.json").write_text(json.dumps(stores.legacy_config(version="0.3.0", command="x")))
    assert glance.look(folder).kind == "hidden_states"
    assert _bytes(nested) == 0 and _bytes([Shape("bfloat16", (2, 3)), nested]) == 12
