"""A glance at drafts and targets, from config.json and headers alone."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stages import glance
from stages.contracts.draft import DraftRecord
from stages.glancing.told import Facts, Told
from stages.targets import families
from tests import tiny
from tests.glancing import stores
from tests.reporting import evidence

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def words(told: Told, level: str) -> str:
    return "\n".join(f"{n.words} [{n.where}] {n.do}" for n in told.notes if n.level == level)


def fed(told: Told) -> dict[tuple[str, str], Facts]:
    return {(f["engine"], f["target"]): f for f in told.facts["fed_by"]}


def test_a_draft_says_which_points_each_engine_and_version_would_feed(tmp_path: Path) -> None:
    told = glance.look(stores.draft(tmp_path / "d"))
    assert told.kind == "draft" and told.what == "draft checkpoint (LlamaForCausalLMEagle3)" and not told.faults
    points = {where: f["points"] for where, f in fed(told).items()}
    assert points[("SGLang ≥ 0.5.13", "Llama, Qwen3, GLM-4, …")] == [3, 31, 59]
    assert points[("SGLang ≥ 0.5.13", "DeepSeek-V2/V3, Kimi-K2")] == [2, 30, 58]
    assert points[("SGLang < 0.5.13", "all")] == [3, 31, 59]
    assert points[("vLLM", "all")] == [2, 30, 58]
    assert "Engines would feed it 2 different sets of points" in words(told, "risk")
    assert told.facts["states_fed"] == 3 and told.facts["fc"] == [8, 24] and told.facts["lm_head"] == [16, 8]
    assert told.facts["d2t"] and told.facts["t2d"] and told.facts["tie_word_embeddings"] is False


def test_our_own_draft_is_held_against_the_points_it_was_trained_on(tmp_path: Path) -> None:
    folder = stores.draft(tmp_path / "d", eagle_config={IDS: [2, 15, 27], "use_aux_hidden_state": True})
    evidence.draft().write(folder / "draft_record.json")
    told = glance.look(folder)
    lines = {f["engine"]: f["as_trained"] for f in told.facts["fed_by"]}
    assert lines == {
        "SGLang ≥ 0.5.13": "yes",
        "SGLang < 0.5.13": "yes",
        "vLLM": "every slot is shifted by -1 layer",
    }
    assert told.facts["points"] == [3, 16, 28] and told.facts["target"] == "smollm2-135m-instruct"
    folder = stores.draft(tmp_path / "e", eagle_config={IDS: [5, 15, 27], "use_aux_hidden_state": True})
    evidence.draft().write(folder / "draft_record.json")
    assert "No engine would feed it the points 3, 16, 28 that it was trained on" in words(glance.look(folder), "fault")


def test_engines_take_their_default_where_ids_are_not_where_they_read_them(tmp_path: Path) -> None:
    top = glance.look(stores.draft(tmp_path / "top", eagle_config=None, **{IDS: [2, 30, 58]}))
    assert fed(top)[("vLLM", "all")]["points"] == [2, 30, 58]
    assert (
        fed(top)[("SGLang < 0.5.13", "all")] | {"ids": "its default", "fed": "2, n//2, n-3"}
        == fed(top)[("SGLang < 0.5.13", "all")]
    )
    assert "stands at the top level only: SGLang reads it in eagle_config alone" in words(top, "risk")
    none = glance.look(stores.draft(tmp_path / "none", eagle_config=None))
    assert f"No {IDS}: every engine feeds its own default" in words(none, "risk")
    two = glance.look(stores.draft(tmp_path / "two", **{IDS: [3, 31, 59]}))
    assert "Two lists of ids: [3, 31, 59] at the top, [2, 30, 58] in eagle_config" in words(two, "fault")


FC_NORM = [f"fc_norm.{i}.weight" for i in range(3)]


@pytest.mark.parametrize(
    ("make", "level", "said"),
    [
        (lambda d: stores.draft(d, drop=["lm_head.weight"]), "fault", "No lm_head.weight: SGLang misses it in silence and serves at accept length 1.00"),
        (lambda d: stores.draft(d, drop=["d2t"]), "fault", "No d2t: a draft vocabulary of 16 out of 32 would be taken for ids 0–15"),
        (lambda d: stores.draft(d, drop=["t2d"]), "note", "d2t without t2d"),
        (lambda d: stores.draft(d, drop=["fc.weight"]), "fault", "No fc.weight: this draft takes no auxiliary states"),
        (lambda d: stores.draft(d, fed=2), "fault", "fc.weight takes 16 values = 2 states of 8; 3 ids are written"),
        (lambda d: stores.draft(d, draft_vocab_size=20), "fault", "lm_head.weight has 16 rows, draft_vocab_size is 20"),
        (lambda d: stores.draft(d, vocab_size=40), "fault", "t2d is [32], not [40]"),
        (lambda d: stores.draft(d, tie_word_embeddings=True), "fault", "tie_word_embeddings is true with a draft vocabulary of 16"),
        (lambda d: stores.draft(d, max_position_embeddings=2048), "risk", "max_position_embeddings is 2048"),
        (lambda d: stores.draft(d, block="layers.0"), "risk", "The block is called layers.0.*: SGLang knows midlayer.*"),
        (lambda d: stores.draft(d, eagle_config={IDS: [2, 30, 58], "use_aux_hidden_state": False}), "fault", "use_aux_hidden_state is false"),
        (lambda d: stores.draft(d, norm_before_fc=True), "risk", "norm_before_fc is set: SGLang's Llama class reads EAGLE-3.1's keys in 0.5.23, its Kimi-K2.5 class all but norm_before_fc"),
        (lambda d: stores.draft(d, norm_before_fc=True), "fault", "norm_before_fc is set, and there is no input_norm.*"),
        (lambda d: stores.draft(d, fc_norm=True, norm_output=True), "fault", "fc_norm is set, and there is no fc_norm.*"),
        (lambda d: stores.draft(d, more=FC_NORM), "fault", "fc_norm is not set, and there is fc_norm.*"),
        (lambda d: stores.draft(d, more=FC_NORM, eagle_config={IDS: [2, 30, 58], "fc_norm": True}), "fault", "fc_norm is not set, and there is fc_norm.*"),
        (lambda d: stores.draft(d, more=FC_NORM, fc_norm=True, norm_output=True), "risk", "fc_norm and norm_output are set"),
        (lambda d: stores.draft(d, norm_output=True), "risk", "norm_output is set: SpecForge 0.2.0 means by it what every draft does"),
        (lambda d: stores.draft(d, num_hidden_layers=2), "note", "num_hidden_layers is 2"),
        (lambda d: stores.draft(d, eagle_config={IDS: [-1, 2, 30], "use_aux_hidden_state": True}), "risk", "SGLang < 0.5.13, SGLang ≥ 0.5.13 would feed it the embedding (point 0)"),
    ],
)  # fmt: skip
def test_what_an_engine_would_pass_over_in_silence_is_said(
    tmp_path: Path, make: Callable[[Path], Path], level: str, said: str
) -> None:
    assert said in words(glance.look(make(tmp_path / "d")), level)


@pytest.mark.parametrize(("key", "names"), [("fc_norm", "fc_norm."), ("use_aux_norm", "aux_norm_")])
def test_norms_with_their_weights_are_no_fault(tmp_path: Path, key: str, names: str) -> None:
    weights = [f"{names}{i}.weight" for i in ("low", "mid", "high")]
    told = glance.look(stores.draft(tmp_path / "d", more=weights, norm_output=True, **{key: True}))
    assert told.facts["norms"] == ["fc_norm", "norm_output"] and "norm" not in words(told, "fault")


def test_the_embedding_is_called_by_its_name(tmp_path: Path) -> None:
    told = glance.look(stores.draft(tmp_path / "d", eagle_config={IDS: [-1, 2, 30], "use_aux_hidden_state": True}))
    assert fed(told)[("SGLang < 0.5.13", "all")]["fed"] == "embedding, 3, 31"
    assert fed(told)[("vLLM", "all")]["fed"] == "cannot: [-1]"


def test_a_draft_whose_weights_are_cut_off_pickled_or_missing_is_told(tmp_path: Path) -> None:
    folder = stores.draft(tmp_path / "d")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert "Damaged:" in words(glance.look(folder), "fault") and "cut off" in words(glance.look(folder), "fault")
    (folder / "model.safetensors").unlink()
    assert "No weights" in words(glance.look(folder), "fault")
    torch.save({"fc.weight": torch.zeros(8, 24), "lm_head.weight": torch.zeros(16, 8)}, folder / "pytorch_model.bin")
    told = glance.look(folder)
    assert told.facts["fc"] == [8, 24] and "Weights are pickled (pytorch_model.bin)" in words(told, "note")


def test_a_record_without_a_config_is_still_a_draft(tmp_path: Path) -> None:
    evidence.draft().write(tmp_path / "draft_record.json")
    told = glance.look(tmp_path)
    assert told.kind == "draft" and DraftRecord.read(tmp_path / "draft_record.json").digest() == told.facts["digest"]
    assert "No weights" in words(told, "fault")


@pytest.mark.parametrize("damage", [b"", b'{"architectures": ["Llama', b"[1, 2]", b'{"n": ' + b"9" * 5000 + b"}"])
def test_a_damaged_config_is_told_in_the_plain_look_and_the_exit_code_stays_that_of_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    """Of a draft with its record, of one without, of a target."""
    ours, theirs, target = (
        stores.draft(tmp_path / "ours"),
        stores.draft(tmp_path / "theirs"),
        tiny.make_target(tmp_path / "t"),
    )
    evidence.draft().write(ours / "draft_record.json")
    for folder in (ours, theirs, target):
        (folder / "config.json").write_bytes(damage)
        monkeypatch.setattr(sys, "argv", ["glance", str(folder)])
        glance.main()
        assert "config.json cannot be read" in capsys.readouterr().out
        assert "[config.json] fetch or export the checkpoint again" in words(glance.look(folder), "fault")
    assert glance.look(target).what == "checkpoint whose config.json cannot be read"


def test_a_target_says_how_each_tool_is_told_the_usual_points(tmp_path: Path) -> None:
    told = glance.look(tiny.make_target(tmp_path / "t"))
    assert told.kind == "target" and told.what == "target checkpoint (llama)" and not told.faults
    ids = {line["tool"]: line["ids"] for line in told.facts["to_capture_them"]}
    assert told.facts["usual_points"] == [1, 3, 5] and told.facts["layers"] == 6
    assert ids["SGLang ≥ 0.5.13"] == [0, 2, 4] and ids["vLLM"] == [1, 3, 5]
    assert ids["speculators ≥ 0.5"] == [1, 3, 5, 6] and ids["speculators 0.3–0.4"] == [0, 2, 4, 5]
    assert told.facts["chat_template"] and told.facts["tokenizer"] == ["tokenizer.json"]


def test_a_target_of_another_class_is_told_in_its_own_ids(tmp_path: Path) -> None:
    folder = tiny.make_target(tmp_path / "t", num_hidden_layers=7)
    raw = json.loads((folder / "config.json").read_text())
    text = {k: raw.pop(k) for k in ("num_hidden_layers", "hidden_size", "vocab_size")}
    raw |= {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (folder / "config.json").write_text(json.dumps(raw))
    told = glance.look(folder)
    ids = {line["tool"]: line["ids"] for line in told.facts["to_capture_them"]}
    assert told.facts["layers"] == 7 and ids["SGLang ≥ 0.5.13"] == [2, 3, 4] and ids["SGLang < 0.5.13"] == [1, 2, 3]
    raw |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    (folder / "config.json").write_text(json.dumps(raw))
    note = f"Its family does not run in this process; those that do: {', '.join(families())}"
    assert note in words(glance.look(folder), "note")


def test_a_target_that_lacks_a_shard_tokenizer_template_or_depth_is_told(tmp_path: Path) -> None:
    folder = tiny.make_target(tmp_path / "t", num_hidden_layers=3)
    assert "3 layers: " in words(glance.look(folder), "fault")
    shutil.rmtree(folder)
    folder = tiny.make_target(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "x": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    faults = words(glance.look(folder), "fault")
    assert "1 file of the index are not there: model-00002-of-00002.safetensors" in faults
    assert "No tokenizer here" in faults and "No chat template" in faults
    save_file({"model.norm.weight": torch.zeros(4)}, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    assert "No lm_head.weight, and tie_word_embeddings is not true" in words(glance.look(folder), "fault")
