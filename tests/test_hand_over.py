"""hand_over writes what another tool's trainer reads: the same rows, in its words for layers, norm and vocabulary."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from stages import extract, hand_over, merge
from stages.bridges.stores import open_store
from stages.capture.store import RowStore
from stages.contracts.adoption import HandOver
from stages.contracts.errors import LineError, Refusal
from stages.contracts.manifest import MERGED, MERGED_MANIFEST, MergedManifest
from stages.targets import load_norm
from tests import line, tiny


def lay(root: Path) -> None:
    """A tiny line up to merge, with gate-training passed."""
    folder = tiny.make_target(root / "target")
    manifest = line.write_prepared(root, folder, line.SOURCES[:2])
    line.write_gate_report(root, "extraction", manifest.digest())
    line.write_params(root, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        extract.main()
        merge.main()
    line.write_gate_report(root, "training", MergedManifest.read(root / MERGED_MANIFEST).digest())


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("merged")
    lay(root)
    return root


@pytest.fixture
def here(merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(merged, tmp_path / "line", ignore=shutil.ignore_patterns(".cache"))
    monkeypatch.chdir(tmp_path / "line")
    return tmp_path / "line"


def hand(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["hand_over", *arguments])
    hand_over.main()


def records() -> list[dict[str, Any]]:
    """Index records, training rows first."""
    index = pq.read_table(MERGED / "index.parquet").to_pylist()
    return [r for r in index if r["split"] == "train"] + [r for r in index if r["split"] == "held_out"]


def test_specforge_gets_training_and_held_out_rows_its_norm_and_its_vocabulary(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand(monkeypatch, "specforge", "out")
    weight, eps = load_norm(here / "target")
    store = RowStore()
    for split in ("train", "held_out"):
        wanted = [r for r in records() if r["split"] == split]
        theirs = open_store(Path("out") / split)
        assert (theirs.kind.tool, [f.folder for f in theirs.files[:1]]) == ("specforge", ["rows_0-2000"])
        for row, file, record in zip(theirs.rows(), theirs.files, wanted, strict=True):
            assert file.bytes < 20_000 + record["length"] * (2 * 4 * tiny.HIDDEN + 16), "no more than the row itself"
            states, ids, mask = store.row(record["folder"], record["row_in_folder"])
            assert torch.equal(row.input_ids, ids.long()) and row.loss_mask is not None
            assert torch.equal(row.loss_mask, mask)
            assert torch.equal(torch.stack(row.aux, 1), states[:, :-1]) and row.last is not None
            normed = torch.nn.functional.rms_norm(states[:, -1].float(), (tiny.HIDDEN,), weight, eps)
            assert torch.equal(row.last, normed.bfloat16())
    mapping, ours = torch.load("out/vocab_mapping.pt", weights_only=True), load_file(MERGED / "vocabulary.safetensors")
    assert torch.equal(mapping["d2t"], ours["d2t"]) and torch.equal(mapping["t2d"], ours["t2d"])
    handed = HandOver.read(HandOver.path(Path("out")))
    assert (handed.numbering, handed.layer_ids, handed.last_state) == ("specforge", (0, 2, 4), "after_final_norm")
    assert handed.merged_digest == MergedManifest.read(MERGED_MANIFEST).digest()
    assert "eagle_aux_hidden_state_layer_ids [0, 2, 4]" in handed.how_to_train


def test_speculators_gets_files_masks_and_a_ratio_that_parts_training_from_held_out_rows(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand(monkeypatch, "speculators", "out")
    store, wanted = RowStore(), records()
    theirs = open_store(Path("out/hidden_states"))
    with pa.ipc.open_stream("out/data-00000-of-00001.arrow") as stream:
        table = stream.read_all().to_pylist()
    assert len(theirs.files) == len(table) == len(wanted)
    for row, line_, record in zip(theirs.rows(), table, wanted, strict=True):
        states, ids, mask = store.row(record["folder"], record["row_in_folder"])
        assert row.input_ids.tolist() == line_["input_ids"] == ids.tolist()
        assert line_["loss_mask"] == mask.tolist() and line_["seq_len"] == len(ids)
        assert row.last is not None and torch.equal(torch.stack([*row.aux, row.last], 1), states)
    handed = HandOver.read(HandOver.path(Path("out")))
    ratio = float(handed.how_to_train.split("--train-data-ratio ")[1].split()[0])
    assert int(len(wanted) * ratio) == handed.train_rows
    assert "--target-layer-ids 1 3 5 " in handed.how_to_train
    size = handed.draft_vocab_size
    ours = load_file(MERGED / "vocabulary.safetensors")
    assert np.array_equal(np.load(f"out/d2t-{size}.npy"), ours["d2t"].numpy())
    assert np.array_equal(np.load(f"out/t2d-{size}.npy"), ours["t2d"].numpy())


def test_what_was_handed_over_is_replaced_as_a_whole_and_nothing_else_is(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand(monkeypatch, "speculators", "out")
    hand(monkeypatch, "specforge", "out")
    assert not Path("out/hidden_states").exists() and Path("out/train").exists()
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with pytest.raises(Refusal, match="Something else stands where the store is to go"):
        hand(monkeypatch, "specforge", "mine")
    assert Path("mine/notes.txt").read_text() == "mine"


def test_only_two_selectors_and_a_form_that_can_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ((), ("specforge",), ("angelslim", "out"), ("specforge", "out", "more")):
        with pytest.raises(LineError, match=r"Hand over to which tool(?s:.)*specforge \| speculators, then a folder"):
            hand(monkeypatch, *arguments)


def test_states_that_gate_training_has_not_passed_are_not_handed_over(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.write_gate_report(here, "training", "sha256:other")
    with pytest.raises(Refusal, match="judged something else"):
        hand(monkeypatch, "specforge", "out")
    assert not Path("out").exists()


def test_a_store_that_does_not_fit_the_disk_is_not_begun(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(hand_over.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(Refusal, match="does not fit on this disk"):
        hand(monkeypatch, "specforge", "out")
    assert not Path("out").exists()
