"""A glance at what this line wrote, at data roots of anyone's, and at single files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from stages import glance
from stages.capture.rows import Row, plan_folders, row_id
from stages.capture.store import write_folder
from stages.contracts.errors import LineError
from stages.contracts.files import digest
from stages.contracts.manifest import CapturedFolder, CaptureManifest
from stages.glancing.told import Told
from tests.glancing import stores
from tests.reporting import evidence

H = 8


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def words(told: Told, level: str) -> str:
    return "\n".join(f"{n.words} [{n.where}] {n.do}" for n in told.notes if n.level == level)


def capture(root: Path, rows: int = 5, each: int = 2) -> Path:
    """A small row store of ours with its manifest."""
    import numpy as np

    spec = evidence.capture_spec().model_copy(update={"hidden_size": H})
    made: list[Row] = []
    for i in range(rows):
        ids, mask = np.arange(i, i + 4 + i, dtype=np.int32), np.ones(4 + i, np.uint8)
        made.append(Row(row_id(ids, mask), ids, mask))
    folders = []
    for plan in plan_folders({"a": made}, each):
        states = (torch.zeros(len(row), 4, H, dtype=torch.bfloat16) for row in plan.rows)
        config = write_folder(root / plan.name, plan, spec, states)
        folders.append(
            CapturedFolder(
                name=plan.name,
                source=plan.source,
                start=plan.start,
                end=plan.end,
                tokens=plan.tokens,
                config_digest=config.digest(),
                rows_digest=config.rows_digest,
            )
        )
    manifest = CaptureManifest(
        prepared_digest=evidence.prepared().digest(),
        capture=spec,
        slots=("point 3", "point 16", "point 28", "point 30, before the final norm"),
        folders=tuple(folders),
        rows=rows,
        tokens=sum(f.tokens for f in folders),
    )
    manifest.write(root / "data_config.json")
    return root


def test_our_row_store_is_counted_and_its_files_are_weighed(tmp_path: Path) -> None:
    told = glance.look(capture(tmp_path / "hidden_states"))
    assert told.what == "hidden states of this line" and told.facts["tool"] == "draftline" and not told.faults
    assert [f["folder"] for f in told.facts["by_folder"]] == ["rows_0-2", "rows_2-4", "rows_4-5"]
    assert told.facts["rows"] == 5 and told.facts["ranges"] == [[0, 5]] and told.facts["points"] == [3, 16, 28]
    assert told.facts["bytes"] == sum(p.stat().st_size for p in tmp_path.rglob("rows.safetensors"))


def test_a_cut_missing_changed_or_strange_folder_of_ours_is_named(tmp_path: Path) -> None:
    root = capture(tmp_path / "hidden_states")
    whole = (root / "rows_0-2/rows.safetensors").read_bytes()
    (root / "rows_0-2/rows.safetensors").write_bytes(whole[:-1])
    (root / "rows_2-4/data_config.json").write_text((root / "rows_2-4/data_config.json").read_text() + " ")
    (root / "rows_4-5").rename(root / "elsewhere")
    (root / ".rows_4-5.77.part").mkdir()
    told = glance.look(root)
    faults = words(told, "fault")
    assert (
        f"1 folder: {len(whole) - 1} bytes where its data_config.json says {len(whole)}: cut off [rows_0-2]" in faults
    )
    assert "its data_config.json is not the one that the manifest speaks of [rows_2-4]" in faults
    assert "the folder is missing [rows_4-5]" in faults and told.next[0] == "dvc repro extract"
    assert "The manifest does not speak of elsewhere" in words(told, "risk")
    assert "Left by a write that did not end: .rows_4-5.77.part" in words(told, "risk")


def test_states_of_other_prepared_rows_are_stale(tmp_path: Path) -> None:
    root = capture(tmp_path / "data/hidden_states")
    evidence.prepared().write(tmp_path / "data/prepared/prepared.json")
    assert "Stale" not in words(glance.look(root), "risk")
    evidence.prepared().model_copy(update={"seed": 8}).write(tmp_path / "data/prepared/prepared.json")
    assert "Stale: made of prepared sha256:" in words(glance.look(root), "risk")


def test_an_extraction_of_ours_that_did_not_end_says_what_goes_on(tmp_path: Path) -> None:
    root = capture(tmp_path / "hidden_states")
    (root / "data_config.json").unlink()
    told = glance.look(root)
    assert told.what == "row folders without a manifest" and told.facts["rows"] == 5
    assert "extract writes it last, so it did not end" in words(told, "fault") and told.next == ["dvc repro extract"]
    assert glance.look(root / "rows_2-4").facts["rows"] == 2


def test_the_work_cache_is_called_so(tmp_path: Path) -> None:
    root = capture(tmp_path / "states/0123abcd")
    (root / "data_config.json").unlink()
    for name in ("rows_0-2", "rows_2-4", "rows_4-5"):
        (root / name).rename(root / digest(name.encode())[7:31])
    told = glance.look(tmp_path / "states")
    assert told.what == "work cache of row folders" and told.facts["rows"] == 5 and not told.faults


def test_our_data_root_tells_the_line_and_its_stale_stages(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    told = glance.look(tmp_path / "data")
    assert told.kind == "data_root" and told.what == "data root of this line" and told.facts["stale"] == []
    assert {s["stage"]: s["state"] for s in told.facts["stages"]}["gate-deployment"] == "passed"
    assert told.next == ["nothing: the line is done"]
    evidence.merged().model_copy(update={"tokens": 1}).write(tmp_path / "data/merged/manifest.json")
    told = glance.look(tmp_path)
    assert "train" in told.facts["stale"] and told.next == ["dvc repro"]
    assert glance.look(tmp_path / "data/merged").what == "merged rows and states"


def test_a_users_data_root_is_told_part_by_part(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "prepared").mkdir(parents=True)
    (root / "prepared/chats.jsonl").write_text("{}\n")
    stores.legacy(root / "hidden_states/rows_0-4")
    stores.legacy(root / "hidden_states/rows_6-10", config={})
    stores.legacy(root / "merged", range(7))
    (root / "logs").mkdir()
    (root / "logs/run.log").write_text("step 1\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    os.utime(root / "prepared", (1, 2_000_000_000))
    told = glance.look(root)
    parts = {p["folder"]: p for p in told.facts["parts"]}
    assert told.what == "data root" and parts["hidden_states"]["rows"] == 8 and parts["merged"]["rows"] == 7
    assert "No folder has rows 4–5 [hidden_states]" in words(told, "fault")
    risks = words(told, "risk")
    assert "merged has 7 rows, hidden_states 8" in risks and "Stale: prepared was written after hidden_states" in risks
    assert "The newest log speaks of trouble: torch.OutOfMemoryError" in risks
    (root / "merged/data_0.pt").rename(root / "hidden_states/x.bin")
    assert glance.look(root / "logs").facts["ends_with"] == "torch.OutOfMemoryError: CUDA out of memory."


def test_a_data_set_of_arrow_files_and_json_lines_are_rows(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/data-00000-of-00001.arrow").write_bytes(b"x" * 10)
    (tmp_path / "a/dataset_info.json").write_text(json.dumps({"splits": {"train": {"num_examples": 12}}}))
    told = glance.look(tmp_path / "a")
    assert told.what == "rows of an Arrow data set (Hugging Face)" and told.facts["rows"] == 12
    (tmp_path / "b").mkdir()
    (tmp_path / "b/chats.jsonl").write_text("{}\n")
    assert "kind: files" in glance.look(tmp_path / "b").next[0]


def test_a_folder_of_several_stores_is_told_by_what_it_holds(tmp_path: Path) -> None:
    stores.legacy(tmp_path / "x/legacy/rows_0-4")
    stores.specforge(tmp_path / "x/forge/rows_0-4", range(4))
    stores.draft(tmp_path / "x/draft")
    (tmp_path / "x/odd").mkdir()
    told = glance.look(tmp_path / "x")
    assert {h["folder"]: h["what"].split(",")[0] for h in told.facts["holds"]} == {
        "draft": "draft checkpoint (LlamaForCausalLMEagle3)",
        "forge": "hidden states of SpecForge",
        "legacy": "hidden states of speculators 0.4.1",
    }
    assert "Nothing says what these are: odd" in words(told, "note")
    stores.legacy(tmp_path / "y/source_a/rows_0-4")
    stores.legacy(tmp_path / "y/source_b/rows_0-4")
    one = glance.look(tmp_path / "y")
    assert one.kind == "hidden_states" and one.facts["rows"] == 8 and not one.faults


def test_a_single_file_says_what_it_holds(tmp_path: Path) -> None:
    folder = stores.legacy(tmp_path / "s", [0])
    told = glance.look(folder / "data_0.pt")
    assert (
        told.kind == "file"
        and {"name": "hidden_states[3]", "dtype": "bfloat16", "shape": [12, 8]} in told.facts["holds"]
    )
    assert glance.look(folder / "sample_lengths.json").kind == "hidden_states"


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.symlink_to("gone")])
def test_a_path_that_says_nothing_is_an_error_with_the_next_step(tmp_path: Path, make: object) -> None:
    make(tmp_path / "x")  # type: ignore[operator]
    with pytest.raises(LineError, match=r"Nothing here says what it is(.|\n)*python -m stages.glance") as error:
        glance.look(tmp_path / "x")
    assert error.value.exit_code == 2
