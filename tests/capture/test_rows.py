"""Prepared rows are read by content and cut into folders that survive growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.capture.rows import plan_folders, read_rows
from stages.contracts.errors import DataError
from stages.contracts.files import file_digest
from stages.contracts.manifest import PREPARED, PreparedManifest
from tests import line, tiny
from tests.capture.conftest import make_row

SOURCES = (line.TinySource("code", "coding", 6), line.TinySource("talk", "general", 5))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedManifest]:
    root = tmp_path_factory.mktemp("prepared")
    return root, line.write_prepared(root, tiny.make_target(root / "target"), SOURCES)


def rewrite(root: Path, manifest: PreparedManifest, rows: list[dict[str, object]]) -> PreparedManifest:
    """Put other rows in the place of the first source's, with a manifest that knows them."""
    path = line.write_rows(root, "code", rows)
    first = manifest.sources[0].model_copy(update={"rows_digest": file_digest(path)})
    return manifest.model_copy(update={"sources": (first, *manifest.sources[1:])})


def test_rows_come_by_source_in_order(prepared: tuple[Path, PreparedManifest]) -> None:
    root, manifest = prepared
    rows = read_rows(manifest, root / PREPARED)
    assert {name: len(members) for name, members in rows.items()} == {"code": 6, "talk": 5}


def test_folders_never_mix_sources_and_cover_every_row_once() -> None:
    rows = {"a": [make_row(i) for i in range(5)], "b": [make_row(i) for i in range(5, 7)], "c": []}
    plans = list(plan_folders(rows, 2))
    assert [p.name for p in plans] == ["rows_0-2", "rows_2-4", "rows_4-5", "rows_5-7"]
    assert [p.source for p in plans] == ["a", "a", "a", "b"]
    assert [i for p in plans for i in p.row_ids] == [r.row_id for members in rows.values() for r in members]


def test_a_grown_source_leaves_the_folders_of_the_next_source_alone() -> None:
    a, b = [make_row(i) for i in range(5)], [make_row(i) for i in range(10, 14)]
    before = [p.row_ids for p in plan_folders({"a": a, "b": b}, 2)]
    after = [p.row_ids for p in plan_folders({"a": [*a, make_row(99)], "b": b}, 2)]
    assert len(set(before) - set(after)) == 1


def test_bytes_other_than_the_manifests_are_named(tmp_path: Path) -> None:
    manifest = line.write_prepared(tmp_path, tiny.make_target(tmp_path / "target"), SOURCES[:1])
    with (tmp_path / PREPARED / "code/rows.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="not those the manifest speaks of") as error:
        read_rows(manifest, tmp_path / PREPARED)
    path = tmp_path / PREPARED / "code/rows.parquet"
    assert error.value.where == str(path)
    assert error.value.do == f"`find .dvc/cache -samefile {path} -delete; rm {path}`, then `dvc repro prepare`"


@pytest.mark.parametrize(
    ("fault", "words"), [("doubled", "1 prepared rows occur more than once"), ("edited", "name is not its content")]
)
def test_a_doubled_or_edited_row_is_named(tmp_path: Path, fault: str, words: str) -> None:
    import pyarrow.parquet as pq

    manifest = line.write_prepared(tmp_path, tiny.make_target(tmp_path / "target"), SOURCES[:1])
    rows = pq.read_table(tmp_path / PREPARED / "code/rows.parquet").to_pylist()
    if fault == "doubled":
        rows.append(rows[2])
    else:
        rows[2]["loss_mask"][0] = 1
    with pytest.raises(DataError, match=words) as error:
        read_rows(rewrite(tmp_path, manifest, rows), tmp_path / PREPARED)
    assert rows[2]["row_id"] in str(error.value)
