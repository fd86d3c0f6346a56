"""One byte flipped anywhere in store, index, manifest or draft is found by what guards it, which names file and rows."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages import extract, merge, train
from stages.capture.layout import group_slices, head_size
from stages.capture.store import ROWS, RowFolder, RowStore, verify_store
from stages.contracts.damage import Damage
from stages.contracts.draft import DRAFT
from stages.contracts.errors import DataError, LineError
from stages.contracts.integrity import verify_draft, verify_merged
from stages.contracts.manifest import HIDDEN_STATES, MERGED, MERGED_MANIFEST, FolderConfig, MergedManifest
from tests import line, tiny

SOURCES = (line.TinySource("code", "coding", 13), line.TinySource("talk", "general", 7))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line up to a draft."""
    root, threads = tmp_path_factory.mktemp("line"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        target = tiny.make_target(root / "target")
        line.write_params(root, target, {"train": {"optimizer_steps": 2, "evaluate_every": 2, "checkpoint_every": 2}})
        prepared = line.write_prepared(root, target, SOURCES)
        line.write_gate_report(root, "extraction", prepared.digest())
        extract.main()
        merge.main()
        line.write_gate_report(root, "training", MergedManifest.read(MERGED_MANIFEST).digest())
        train.main()
        shutil.rmtree(".cache")
        for file in HIDDEN_STATES.rglob("*"):
            if file.is_file():
                file.chmod(0o644)
    torch.set_num_threads(threads)
    return root


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(trained)
    threads = torch.get_num_threads()
    yield trained
    torch.set_num_threads(threads)


class Flipped:
    """A file with one byte changed, put back on leaving."""

    def __init__(self, file: Path, at: int, by: int) -> None:
        self.file, self.at, self.by = file, at, by

    def __enter__(self) -> None:
        self._write()

    def __exit__(self, *_: object) -> None:
        self._write()

    def _write(self) -> None:
        with self.file.open("r+b") as handle:
            handle.seek(self.at)
            byte = handle.read(1)[0]
            handle.seek(self.at)
            handle.write(bytes([byte ^ self.by]))


def places(folder: Path, count: int, chance: random.Random) -> list[tuple[Path, int, int]]:
    """`count` random bytes of the files below `folder`, each kind of file as often as another."""
    kinds: dict[str, list[Path]] = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        kinds.setdefault(file.name, []).append(file)
    names = sorted(kinds)
    chosen = [chance.choice(kinds[names[i % len(names)]]) for i in range(count)]
    return [(file, chance.randrange(file.stat().st_size), chance.randrange(1, 256)) for file in chosen]


def everything() -> list[Damage]:
    store = [d for d in verify_store(HIDDEN_STATES)]
    return store + verify_merged() + verify_draft()


def rows_at(folder: Path, at: int) -> tuple[int, int] | None:
    """The rows whose group has this byte; None in the header and the offsets."""
    config = FolderConfig.read(folder / "data_config.json")
    if at < head_size(config):
        return None
    for group, slices in group_slices(config):
        if any(begin <= at < end for begin, end in slices):
            return config.start + group.start, config.start + group.end
    raise AssertionError(f"byte {at} belongs to no group")


def test_two_hundred_flipped_bytes_are_found_and_their_files_and_rows_named(here: Path) -> None:
    assert everything() == []
    chance = random.Random(11)
    flips = [p for folder, n in ((HIDDEN_STATES, 80), (MERGED, 60), (DRAFT, 60)) for p in places(folder, n, chance)]
    assert len(flips) == 200
    for file, at, by in flips:
        rows = rows_at(file.parent, at) if file.name == ROWS else None
        with Flipped(file, at, by):
            found = everything()
        named = [d for d in found if str(file).endswith(d.file)]
        assert named and all(d.expected != d.got and d.do for d in named), f"{file} byte {at} by {by}: {found}"
        if file.name == ROWS:
            assert [d.rows for d in found] == [rows], f"{file} byte {at}"
            assert named[0].folder == file.parent.name
    assert everything() == []


def test_the_reader_refuses_the_rows_of_a_damaged_group_and_reads_the_others(here: Path) -> None:
    chance = random.Random(12)
    files = sorted(HIDDEN_STATES.glob(f"*/{ROWS}"))
    for _ in range(40):
        file = chance.choice(files)
        config = FolderConfig.read(file.parent / "data_config.json")
        at = chance.randrange(head_size(config), file.stat().st_size)
        rows = rows_at(file.parent, at)
        assert rows is not None
        with Flipped(file, at, 1 << chance.randrange(8)):
            store, refused = RowStore(), []
            for i in range(len(config.row_ids)):
                try:
                    store.row(config.name, i)
                except DataError as error:
                    assert (
                        f"{config.name}/{ROWS}: row" in error.where
                        and config.row_ids[rows[0] - config.start] in error.where
                    )
                    refused.append(config.start + i)
        assert refused == list(range(*rows))


def test_a_damaged_header_is_refused_before_a_row_is_read(here: Path) -> None:
    file = sorted(HIDDEN_STATES.glob(f"*/{ROWS}"))[0]
    size = head_size(RowFolder(file.parent).config)
    for at in range(0, size, 29):
        with Flipped(file, at, 1), pytest.raises(DataError) as error:
            RowStore().row(file.parent.name, 0)
        assert file.parent.name in error.value.where


@pytest.mark.parametrize("folder", [HIDDEN_STATES, MERGED], ids=str)
def test_training_refuses_what_it_would_read_damaged(here: Path, folder: Path) -> None:
    old = (DRAFT / "model.safetensors").read_bytes()
    seen: set[str] = set()
    for file, at, by in places(folder, 40, random.Random(13)):
        if file.name in seen:
            continue
        seen.add(file.name)
        with Flipped(file, at, by), pytest.raises(LineError) as error:
            train.main()
        assert file.name in error.value.text() or file.parent.name in error.value.text()
        assert (DRAFT / "model.safetensors").read_bytes() == old


def test_files_that_are_gone_or_strange_are_damage_too(here: Path, tmp_path: Path) -> None:
    root = tmp_path / "hidden_states"
    shutil.copytree(HIDDEN_STATES, root)
    names = sorted(p.name for p in root.iterdir() if p.is_dir())
    (root / names[0] / ROWS).unlink()
    shutil.rmtree(root / names[1])
    shutil.copytree(root / names[2], root / "rows_90-92")
    words = {d.folder: d.what for d in verify_store(root)}
    assert words == {
        names[0]: "The file of a folder's rows is missing",
        names[1]: "A folder of the manifest is missing",
        "rows_90-92": "A folder is not in the manifest",
    }
    assert [d.folder for d in verify_store(root, [names[0], names[3]])] == [names[0]]
    (root / "data_config.json").unlink()
    assert "No CaptureManifest here" in [d.what for d in verify_store(root)]
