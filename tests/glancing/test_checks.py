"""`--deep`, `--verify` and `--json`: what they find, and the exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from stages import glance
from stages.contracts.draft import DraftRecord
from stages.contracts.errors import LineError, Refusal, run
from stages.contracts.evidence import TRAIN_METRICS, TrainMetrics
from stages.contracts.files import file_digest
from stages.targets import load_target
from tests import tiny
from tests.glancing import stores
from tests.glancing.test_ours import capture
from tests.reporting import evidence


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ask(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a glance."""
    monkeypatch.setattr(sys, "argv", ["glance", *arguments])
    try:
        run(glance.main)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def make_rows(folder: Path, seed: int = 0) -> Path:
    """A legacy store whose states are no constants."""
    stores.legacy(folder)
    g = torch.Generator().manual_seed(seed)
    for i in range(4):
        value = {
            "input_ids": torch.randint(3, 90, (stores.TOKENS,), generator=g),
            "hidden_states": [torch.randn(stores.TOKENS, stores.H, generator=g).bfloat16() for _ in range(4)],
            "loss_mask": (torch.arange(stores.TOKENS) > 5).long(),
        }
        torch.save(value, folder / f"data_{i}.pt")
    return folder


def test_a_look_at_values_finds_nothing_in_a_sound_store_and_exits_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_rows(tmp_path / "s")
    assert ask(monkeypatch, "s", "--deep", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["deep"]["files_opened"] == 4 and not [n for n in told["notes"] if n["level"] == "fault"]
    assert any(n["words"].startswith("No target at hand") for n in told["notes"])
    assert not any(step.endswith("--deep") for step in told["next"])


def test_a_row_with_a_nan_and_a_file_with_other_bytes_are_found_and_exit_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_rows(tmp_path / "s")
    value = torch.load(folder / "data_1.pt", weights_only=True)
    value["hidden_states"][2][3, 4] = float("nan")
    torch.save(value, folder / "data_1.pt")
    raw = bytearray((folder / "data_2.pt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / "data_2.pt").write_bytes(bytes(raw))
    assert ask(monkeypatch, "s", "--deep", "--json") == 1
    out, err = capsys.readouterr()
    faults = [n for n in json.loads(out)["notes"] if n["level"] == "fault"]
    assert any("NaN" in n["words"] and "data_1.pt" in n["where"] for n in faults)
    assert any("data_2.pt" in n["where"] for n in faults) and "found" in err


def test_digests_of_our_own_files_are_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = capture(tmp_path / "hidden_states")
    assert ask(monkeypatch, "hidden_states", "--verify") == 0
    path = root / "rows_2-4/rows.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(bytes(raw))
    assert ask(monkeypatch, "hidden_states", "--json") == 0, "a glance reads no contents"
    assert ask(monkeypatch, "hidden_states", "--verify") == 1
    assert ask(monkeypatch, "hidden_states/rows_2-4", "--verify") == 1
    assert ask(monkeypatch, "hidden_states/rows_0-2", "--verify") == 0
    for name in ("rows_0-2", "rows_2-4"):
        (tmp_path / "hidden_states" / name).rename(tmp_path / name)
    assert ask(monkeypatch, "rows_0-2", "--verify") == 0, "a folder that was copied away stands on its own config"
    assert ask(monkeypatch, "rows_2-4", "--verify") == 1


def test_a_flipped_byte_in_merged_rows_or_a_draft_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("index.parquet", "vocabulary.safetensors"):
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_bytes(name.encode())
    digests = {"index_digest": file_digest(tmp_path / "m/index.parquet")}
    digests["vocabulary_digest"] = file_digest(tmp_path / "m/vocabulary.safetensors")
    evidence.merged().model_copy(update=digests).write(tmp_path / "m/manifest.json")
    assert ask(monkeypatch, "m", "--verify") == 0
    (tmp_path / "m/index.parquet").write_bytes(b"jndex.parquet")
    assert ask(monkeypatch, "m", "--verify") == 1
    folder = stores.draft(tmp_path / "d")
    own = {
        "weights_digest": file_digest(folder / "model.safetensors"),
        "config_digest": file_digest(folder / "config.json"),
    }
    evidence.draft().model_copy(update=own).write(folder / "draft_record.json")
    told = glance.look(folder)
    glance.verify(told, folder)
    assert told.facts["verified"] == {"files": 2, "as_written": 2}
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    told = glance.look(folder)
    glance.verify(told, folder)
    with pytest.raises(Refusal, match="Not the bytes that were written") as refused:
        glance.demand_sound(told)
    assert refused.value.exit_code == 1


def test_a_deep_look_at_a_draft_audits_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores.draft(tmp_path / "d")
    assert ask(monkeypatch, "d", "--deep") == 1, "the tiny draft lacks most of a decoder block"


@pytest.mark.parametrize("arguments", [("s", "t", "u"), ("s", "--fast"), ("--deep",), ("--verify",)])
def test_what_cannot_be_asked_is_said_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert ask(monkeypatch, *arguments) == 2
    assert "Glance at what?" in capsys.readouterr().err


def test_an_unknown_path_exits_with_2_and_a_fault_seen_in_passing_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(monkeypatch, "nowhere") == 2
    stores.legacy(tmp_path / "s", config={})
    assert ask(monkeypatch, "s") == 0
    assert "No data_config.json" in capsys.readouterr().out


def test_values_and_digests_are_refused_where_there_are_none(tmp_path: Path) -> None:
    root = capture(tmp_path / "hidden_states")
    with pytest.raises(LineError, match="no values here that a glance looks at"):
        glance.deepen(glance.look(root), root)
    stores.legacy(tmp_path / "s")
    with pytest.raises(LineError, match="Nothing here has digests"):
        glance.verify(glance.look(tmp_path / "s"), tmp_path / "s")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target") / "t")


def captured(root: Path, target: Path, ids: tuple[int, ...], points: tuple[int, ...]) -> Path:
    """A legacy store of the tiny target's own states at `points`, whose config writes `ids`."""
    decoder = load_target(target)
    config = stores.legacy_config(layer_ids=list(ids), hidden_size=tiny.HIDDEN, target_model_path=str(target))
    stores.legacy(root, config=config, lengths=False)
    g = torch.Generator().manual_seed(5)
    for i in range(4):
        tokens = torch.randint(3, 259, (80 + i,), generator=g)
        stream = decoder.packed(tokens, [len(tokens)], points)
        kept = [stream.states[p].bfloat16() for p in points]
        mask = (torch.arange(len(tokens)) > 40).long()
        torch.save({"input_ids": tokens, "hidden_states": kept, "loss_mask": mask}, root / f"data_{i}.pt")
    return root


def test_with_its_target_at_hand_a_store_is_recomputed_and_a_shift_is_named(tmp_path: Path, target: Path) -> None:
    right = captured(tmp_path / "right", target, (0, 2, 4, 5), (1, 3, 5, 6))
    told = glance.look(right)
    assert told.facts["points"] == [1, 3, 5] and told.facts["layers"] == 6
    glance.deepen(told, right)
    assert told.facts["recomputed_with"] == str(target)
    assert "probed" in told.facts["deep"]["kinds"] and not [f for f in told.faults if "layer" in f.words]
    wrong = captured(tmp_path / "wrong", target, (1, 3, 4, 5), (1, 3, 5, 6))
    told = glance.look(wrong)
    assert told.facts["points"] == [2, 4, 5]
    glance.deepen(told, wrong)
    assert [f for f in told.faults if "data_" in f.where]
    with pytest.raises(Refusal):
        glance.demand_sound(told)


def test_a_draft_in_its_line_is_held_against_what_training_wrote_beside_it(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    folder = tmp_path / "models/draft"

    def damaged() -> object:
        told = glance.look(folder)
        glance.verify(told, folder)
        return told.facts["verified"]["damaged_places"]

    for file in stores.draft(tmp_path / "d").iterdir():
        file.rename(folder / file.name)
    own = {
        "weights_digest": file_digest(folder / "model.safetensors"),
        "config_digest": file_digest(folder / "config.json"),
    }
    evidence.draft().model_copy(update=own).write(folder / "draft_record.json")
    assert damaged() == 1, "its own files are in order, and training wrote another record"
    metrics = TrainMetrics.read(tmp_path / TRAIN_METRICS)
    digest = DraftRecord.read(folder / "draft_record.json").digest()
    metrics.model_copy(update={"draft_digest": digest}).write(tmp_path / TRAIN_METRICS)
    assert damaged() == 0
