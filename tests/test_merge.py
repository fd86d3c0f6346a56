"""merge over a tiny target: every row exactly once, no tensor copied, a vocabulary by rule."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from stages import extract, merge
from stages.capture.store import CONFIG, ROWS, RowStore
from stages.contracts.errors import DataError, ParamsError, Refusal
from stages.contracts.files import canonical
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    HIDDEN_STATES,
    MERGED,
    MERGED_MANIFEST,
    PREPARED_MANIFEST,
    CapturedFolder,
    CaptureManifest,
    FolderConfig,
    MergedManifest,
    PreparedManifest,
)
from tests import line, tiny
from tests.capture.conftest import bytes_of


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared rows and their states, to be copied by each test."""
    root = tmp_path_factory.mktemp("captured")
    target = tiny.make_target(root / "target")
    manifest = line.write_prepared(root, target)
    line.write_gate_report(root, "extraction", manifest.digest())
    line.write_params(root, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        extract.main()
    return root


@pytest.fixture
def here(captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(captured, tmp_path / "line", ignore=shutil.ignore_patterns(".cache"))
    monkeypatch.chdir(tmp_path / "line")
    return tmp_path / "line"


def index() -> list[dict[str, Any]]:
    return pq.read_table(MERGED / "index.parquet").to_pylist()


def test_the_index_leads_from_every_prepared_row_to_its_states(here: Path) -> None:
    merge.main()
    prepared = [
        row
        for source in PreparedManifest.read(PREPARED_MANIFEST).sources
        for row in pq.read_table(f"data/prepared/{source.name}/rows.parquet").to_pylist()
    ]
    store = RowStore()
    assert [r["row_id"] for r in index()] == [r["row_id"] for r in prepared]
    for record, row in zip(index(), prepared, strict=True):
        states, ids, mask = store.row(record["folder"], record["row_in_folder"])
        assert ids.tolist() == row["input_ids"] and mask.tolist() == row["loss_mask"]
        assert record["length"] == len(states) == len(row["input_ids"])
        assert store.folder(record["folder"]).offsets[record["row_in_folder"]] == record["offset"]
        assert record["supervised_tokens"] == sum(row["loss_mask"])
        for name in ("prompt_id", "source", "domain", "split", "prompt_tokens", "finish"):
            assert record[name] == row[name]


def test_the_manifest_chains_digests_and_counts_what_is_there(here: Path) -> None:
    merge.main()
    manifest = MergedManifest.read(MERGED_MANIFEST)
    assert manifest.prepared_digest == PreparedManifest.read(PREPARED_MANIFEST).digest()
    assert manifest.capture_digest == CaptureManifest.read(CAPTURE_MANIFEST).digest()
    assert manifest.rows == 32 == manifest.train_rows + manifest.held_out_rows
    assert manifest.tokens == sum(r["length"] for r in index())
    assert set(manifest.coverage.by_domain_held_out) == {"coding", "agentic", "general"}


def test_no_tensor_is_copied(here: Path) -> None:
    merge.main()
    assert sorted(p.name for p in MERGED.iterdir()) == ["index.parquet", "manifest.json", "vocabulary.safetensors"]
    assert sum(p.stat().st_size for p in MERGED.iterdir()) < 0.1 * sum(
        p.stat().st_size for p in HIDDEN_STATES.rglob(ROWS)
    )


def test_equal_inputs_give_equal_bytes(here: Path) -> None:
    merge.main()
    first = bytes_of(MERGED)
    merge.main()
    assert bytes_of(MERGED) == first


def test_a_damaged_linked_file_is_replaced_and_its_links_are_left_as_they_are(here: Path) -> None:
    merge.main()
    first = bytes_of(MERGED)
    (MERGED / "index.parquet").write_bytes(b"damaged")
    (here / "object").hardlink_to(MERGED / "index.parquet")
    (MERGED / "index.parquet").chmod(0o444)
    (MERGED / "stray").touch()
    merge.main()
    assert bytes_of(MERGED) == first
    assert (here / "object").read_bytes() == b"damaged"


def test_the_vocabulary_file_maps_both_ways(here: Path) -> None:
    merge.main()
    vocabulary = load_file(MERGED / "vocabulary.safetensors")
    d2t, t2d = vocabulary["d2t"], vocabulary["t2d"]
    ids = np.arange(len(d2t)) + d2t
    assert d2t.dtype == np.int64 and t2d.dtype == np.bool_ and (np.diff(ids) > 0).all()
    assert np.array_equal(np.flatnonzero(t2d), ids)


def test_a_vocabulary_too_small_for_its_byte_tokens_is_refused(here: Path) -> None:
    line.write_params(here, here / "target", {"merge": {"draft_vocab_size": 100}})
    with pytest.raises(ParamsError, match="No draft vocabulary of this size") as error:
        merge.main()
    assert error.value.where.endswith("merge.draft_vocab_size") and "259" in error.value.expected
    assert not MERGED_MANIFEST.exists()


def change_manifest(folders: list[CapturedFolder]) -> None:
    manifest = CaptureManifest.read(CAPTURE_MANIFEST)
    manifest.model_copy(update={"folders": tuple(folders)}).write(CAPTURE_MANIFEST)


def test_missing_rows_are_counted_and_named(here: Path) -> None:
    folders = CaptureManifest.read(CAPTURE_MANIFEST).folders
    lost = RowStore().folder(folders[1].name).config.row_ids
    change_manifest([f for f in folders if f != folders[1]])
    with pytest.raises(DataError, match="every planned row must have its states exactly once") as error:
        merge.main()
    assert f"{len(lost)} missing: {lost[0]}, {lost[1]}" in error.value.got and "doubled" not in error.value.got


def test_doubled_rows_are_counted_and_named(here: Path) -> None:
    folders = list(CaptureManifest.read(CAPTURE_MANIFEST).folders)
    twice = folders[2]
    shutil.copytree(HIDDEN_STATES / twice.name, HIDDEN_STATES / "rows_90-92")
    config = FolderConfig.read(HIDDEN_STATES / twice.name / CONFIG).model_copy(update={"start": 90, "end": 92})
    config.write(HIDDEN_STATES / "rows_90-92" / CONFIG)
    extra = twice.model_copy(update={"name": "rows_90-92", "start": 90, "end": 92, "config_digest": config.digest()})
    change_manifest([*folders, extra])
    with pytest.raises(DataError) as error:
        merge.main()
    assert error.value.got == f"2 doubled: {config.row_ids[0]}, {config.row_ids[1]}"


def test_rows_that_were_not_planned_are_counted_and_named(here: Path) -> None:
    prepared = PreparedManifest.read(PREPARED_MANIFEST)
    fewer = prepared.model_copy(update={"sources": prepared.sources[:-1]})
    fewer.write(PREPARED_MANIFEST)
    capture = CaptureManifest.read(CAPTURE_MANIFEST).model_copy(update={"prepared_digest": fewer.digest()})
    capture.write(CAPTURE_MANIFEST)
    with pytest.raises(DataError) as error:
        merge.main()
    assert error.value.got.startswith("8 not planned: ") and error.value.got.endswith(" …")


@pytest.mark.parametrize("change", [{"rows": 31}, {"tokens": 7}, {"slots": ("point 1",) * 4}])
def test_a_manifest_that_says_other_things_than_its_folders_is_named(here: Path, change: dict[str, Any]) -> None:
    CaptureManifest.read(CAPTURE_MANIFEST).model_copy(update=change).write(CAPTURE_MANIFEST)
    with pytest.raises(DataError, match="does not describe its folders") as error:
        merge.main()
    assert error.value.where == str(CAPTURE_MANIFEST) and next(iter(change)) in error.value.got


def test_states_of_other_rows_are_refused(here: Path) -> None:
    prepared = PreparedManifest.read(PREPARED_MANIFEST)
    prepared.model_copy(update={"seed": 8}).write(PREPARED_MANIFEST)
    with pytest.raises(Refusal, match="belong to other rows, or to another target") as error:
        merge.main()
    assert "dvc repro extract" in error.value.do


def test_a_folder_put_in_another_ones_place_is_named(here: Path) -> None:
    name = "rows_0-6"
    config = json.loads((HIDDEN_STATES / name / CONFIG).read_text())
    (HIDDEN_STATES / name / CONFIG).write_bytes(canonical(config | {"rows_digest": "sha256:other"}))
    with pytest.raises(DataError, match="not the one its manifest speaks of") as error:
        merge.main()
    assert error.value.where.endswith(name) and not MERGED_MANIFEST.exists()


def test_a_cut_file_is_named_before_anything_is_written(here: Path) -> None:
    file = HIDDEN_STATES / "rows_6-12" / ROWS
    file.chmod(0o644)
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-7])
    with pytest.raises(DataError, match="damaged or does not fit") as error:
        merge.main()
    assert "rows_6-12" in error.value.where and not MERGED.exists()
