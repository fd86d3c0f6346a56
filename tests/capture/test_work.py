"""The work cache: resume, reuse by row, and no damaged byte used in silence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages.capture.forecast import remember_rate, remembered_rate
from stages.capture.layout import group_slices, head_bytes, offsets_of
from stages.capture.quarantine import REASON, link_or_copy
from stages.capture.rows import FolderPlan
from stages.capture.spill import capture_rows
from stages.capture.store import CONFIG, ROWS, RowFolder, write_folder
from stages.capture.work import WorkCache
from stages.targets._decoder import Decoder
from tests.capture.conftest import SPEC, bytes_of, make_plan


def fill(target: Decoder, cache: WorkCache, plan: FolderPlan) -> int:
    """Finish `plan` in the cache; return how many rows went through the target."""
    missing = cache.missing(plan)
    if not cache.has(plan.row_ids):
        groups = cache.cut(plan, 64)
        states = cache.states(plan, capture_rows(target, missing, SPEC.points, 64))
        cache.note(write_folder(cache.path(plan.row_ids), plan, SPEC, states, groups))
    return len(missing)


def test_a_finished_folder_is_found_by_content_whatever_its_number_or_source(target: Decoder, tmp_path: Path) -> None:
    assert fill(target, WorkCache(SPEC, tmp_path), make_plan(range(4))) == 4
    moved = make_plan(range(4), start=100, source="talk")
    cache = WorkCache(SPEC, tmp_path)
    assert cache.has(moved.row_ids) and fill(target, cache, moved) == 0
    config = cache.link(moved, tmp_path / "out")
    assert (config.name, config.source) == ("rows_100-104", "talk")
    RowFolder(tmp_path / "out" / "rows_100-104").verify()


def test_rows_are_reused_across_folder_boundaries_byte_for_byte(target: Decoder, tmp_path: Path) -> None:
    cache = WorkCache(SPEC, tmp_path)
    for part in (range(0, 10), range(10, 19)):
        fill(target, cache, make_plan(part))
    cache = WorkCache(SPEC, tmp_path)
    plan = make_plan(range(5, 20))
    assert [row.row_id for row in cache.missing(plan)] == [make_plan(range(19, 20)).rows[0].row_id]
    assert fill(target, cache, plan) == 1
    joined = cache.folder(cache.key(plan.row_ids))
    first = cache.folder(cache.key(make_plan(range(10)).row_ids))
    assert all(torch.equal(joined.row(i)[0], first.row(i + 5)[0]) for i in range(5))


def test_another_capture_spec_shares_nothing(target: Decoder, tmp_path: Path) -> None:
    fill(target, WorkCache(SPEC, tmp_path), make_plan(range(3)))
    for changes in ({"points": (2, 3, 4)}, {"weights_digest": "sha256:other"}, {"compute_dtype": "bfloat16"}):
        assert len(WorkCache(SPEC.model_copy(update=changes), tmp_path).missing(make_plan(range(3)))) == 3


def flip(file: Path, at: int) -> None:
    """Another byte at `at`, in place, so that every link sees it."""
    with file.open("r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 4]))


def group_place(folder: Path, group: int) -> int:
    """A byte of a folder's row group."""
    return [slices[0][0] + 7 for _, slices in group_slices(RowFolder(folder).config)][group]


@pytest.mark.parametrize("whole", [True, False])
def test_a_flipped_byte_costs_its_row_group_whether_the_folder_or_a_row_of_it_is_wanted(
    target: Decoder, tmp_path: Path, whole: bool
) -> None:
    plan, cache = make_plan(range(9)), WorkCache(SPEC, tmp_path / "states")
    fill(target, cache, plan)
    path = cache.path(plan.row_ids)
    good, groups = (path / ROWS).read_bytes(), RowFolder(path).config.groups
    assert len(groups) > 2
    flip(path / ROWS, group_place(path, 1))
    bad = (path / ROWS).read_bytes()
    cache, wanted = WorkCache(SPEC, tmp_path / "states"), plan if whole else make_plan(range(2, 12))
    (damage,) = cache.heal([wanted])
    rows = plan.rows[groups[1].start : groups[1].end]
    assert damage.row_ids == tuple(row.row_id for row in rows)
    assert damage.rows == (groups[1].start, groups[1].end) and damage.where.startswith(f"{path.name}/{ROWS}: row")
    new = [] if whole else [row.row_id for row in wanted.rows[7:]]
    lost = [row.row_id for row in rows if row.row_id in wanted.row_ids]
    assert [row.row_id for row in cache.missing(wanted)] == lost + new and not cache.has(plan.row_ids)
    fill(target, cache, wanted)
    if whole:
        assert (path / ROWS).read_bytes() == good
    (kept,) = (tmp_path / "quarantine").iterdir()
    assert (kept / ROWS).read_bytes() == bad and json.loads((kept / REASON).read_text())[0]["got"] == damage.got


def test_a_damaged_header_costs_no_row(target: Decoder, tmp_path: Path) -> None:
    plan, cache = make_plan(range(9)), WorkCache(SPEC, tmp_path / "states")
    fill(target, cache, plan)
    rows = cache.path(plan.row_ids) / ROWS
    good = rows.read_bytes()
    head = head_bytes(SPEC, offsets_of(plan.rows, SPEC.form))
    for at in (3, 60, len(head) - 20):  # its length, its text, the offsets
        flip(rows, at)
        cache = WorkCache(SPEC, tmp_path / "states")
        (damage,) = cache.heal([plan])
        assert "header or offsets" in damage.what and damage.rows is None
        assert fill(target, cache, plan) == 0 and rows.read_bytes() == good


@pytest.mark.parametrize("damage", ["config cut", "config of other rows", "rows cut", "a digest of the config"])
def test_a_folder_that_cannot_be_relied_on_is_set_aside_and_computed_again(
    target: Decoder, tmp_path: Path, damage: str
) -> None:
    cache = WorkCache(SPEC, tmp_path / "states")
    plan, other = make_plan(range(3)), make_plan(range(3, 6))
    for p in (plan, other):
        fill(target, cache, p)
    path, good = cache.path(plan.row_ids), bytes_of(tmp_path / "states")
    if damage == "config cut":
        (path / CONFIG).write_bytes((path / CONFIG).read_bytes()[:100])
    elif damage == "config of other rows":
        (path / CONFIG).write_bytes((cache.path(other.row_ids) / CONFIG).read_bytes())
    elif damage == "a digest of the config":
        config = RowFolder(path).config
        config.model_copy(update={"rows_digest": "sha256:0"}).write(path / CONFIG)
    else:
        (path / ROWS).write_bytes((path / ROWS).read_bytes()[:-1])
    cache = WorkCache(SPEC, tmp_path / "states")
    assert cache.heal([plan, other]) and all(d.folder == path.name for d in cache.damages)
    computed = 0 if damage == "a digest of the config" else 3
    assert [fill(target, cache, p) for p in (plan, other)] == [computed, 0]
    assert bytes_of(tmp_path / "states") == good
    (kept,) = (tmp_path / "quarantine").iterdir()
    assert (kept / REASON).exists() and (kept / CONFIG).exists()


def test_rows_lost_in_one_folder_are_taken_from_another(target: Decoder, tmp_path: Path) -> None:
    cache = WorkCache(SPEC, tmp_path / "states")
    for part in (range(5), range(3, 9)):
        fill(target, cache, make_plan(part))
    first = cache.path(make_plan(range(5)).row_ids)
    (first / ROWS).write_bytes(b"gone")
    cache = WorkCache(SPEC, tmp_path / "states")
    cache.heal([make_plan(range(5))])
    assert [row.row_id for row in cache.missing(make_plan(range(5)))] == list(make_plan(range(3)).row_ids)


def test_folders_that_stand_in_the_output_alone_are_taken_in(target: Decoder, tmp_path: Path) -> None:
    plan, cache = make_plan(range(4)), WorkCache(SPEC, tmp_path / "states")
    fill(target, cache, plan)
    cache.link(plan, tmp_path / "out")
    shutil.rmtree(tmp_path / "states")
    cache = WorkCache(SPEC, tmp_path / "states")
    assert cache.take_in(tmp_path / "out") == 1 and cache.take_in(tmp_path / "out") == 0
    assert not cache.heal([plan]) and fill(target, cache, plan) == 0
    other = WorkCache(SPEC.model_copy(update={"points": (2, 3, 4)}), tmp_path / "states")
    assert other.take_in(tmp_path / "out") == 0


def test_a_damaged_copy_in_the_output_is_kept_before_it_is_replaced_and_a_sound_one_is_linked(
    target: Decoder, tmp_path: Path
) -> None:
    plan, cache = make_plan(range(4)), WorkCache(SPEC, tmp_path / "states")
    fill(target, cache, plan)
    cache.link(plan, tmp_path / "out")
    rows = tmp_path / "out" / plan.name / ROWS
    data = rows.read_bytes()
    rows.unlink()
    rows.write_bytes(data)  # a copy: another inode
    cache.link(plan, tmp_path / "out")
    assert os.path.samefile(rows, cache.path(plan.row_ids) / ROWS) and not cache.damages
    was = rows.stat().st_ctime_ns
    cache.link(plan, tmp_path / "out")
    assert rows.stat().st_ctime_ns == was, "a link that stands is left alone"
    rows.unlink()
    rows.write_bytes(data)
    flip(rows, 2000)
    cache.link(plan, tmp_path / "out")
    assert rows.read_bytes() == data and cache.damages[0].folder == plan.name
    (kept,) = (tmp_path / "quarantine").iterdir()
    assert kept.name.startswith(plan.name) and (kept / ROWS).read_bytes() != data


def test_a_linked_folder_shares_its_bytes_and_read_only_files_are_no_hindrance(target: Decoder, tmp_path: Path) -> None:
    cache = WorkCache(SPEC, tmp_path / "work")
    plan = make_plan(range(3))
    fill(target, cache, plan)
    for file in cache.path(plan.row_ids).iterdir():
        file.chmod(0o444)
    for _ in range(2):  # the second time over what is there, read-only as DVC leaves it
        cache.link(plan, tmp_path / "out")
        out = tmp_path / "out" / plan.name / ROWS
        out.chmod(0o444)
    assert os.path.samefile(out, cache.path(plan.row_ids) / ROWS)


def test_where_links_are_refused_the_file_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    (tmp_path / "a").write_bytes(b"states")
    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"states" and not os.path.samefile(tmp_path / "a", tmp_path / "b")


def test_leftovers_of_a_killed_process_are_swept_and_those_of_a_living_one_stay(
    target: Decoder, tmp_path: Path
) -> None:
    cache = WorkCache(SPEC, tmp_path)
    dead, living = cache.root / ".abc.99999999.part", cache.root / f".abc.{os.getpid()}.part"
    for part in (dead, living):
        part.mkdir()
        (part / ROWS).write_bytes(b"half")
    WorkCache(SPEC, tmp_path)
    assert not dead.exists() and living.exists()


def test_superseded_folders_go_and_folders_with_other_rows_stay(target: Decoder, tmp_path: Path) -> None:
    cache = WorkCache(SPEC, tmp_path)
    small, large, other = make_plan(range(3)), make_plan(range(5)), make_plan(range(2, 7))
    for plan in (small, large, other):
        fill(target, cache, plan)
    assert cache.drop_superseded([large]) == 1
    assert [cache.has(plan.row_ids) for plan in (small, large, other)] == [False, True, True]


def test_a_run_broken_off_in_a_folder_keeps_the_finished_ones(target: Decoder, tmp_path: Path) -> None:
    def broken(states: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        yield next(states)
        raise KeyboardInterrupt

    cache = WorkCache(SPEC, tmp_path)
    done, half = make_plan(range(4)), make_plan(range(4, 8))
    fill(target, cache, done)
    with pytest.raises(KeyboardInterrupt):
        write_folder(cache.path(half.row_ids), half, SPEC, broken(capture_rows(target, half.rows, SPEC.points, 64)))
    again = WorkCache(SPEC, tmp_path)
    assert again.has(done.row_ids) and not again.has(half.row_ids) and len(again.missing(half)) == 4
    assert not list(again.root.glob(".*"))


def test_a_folder_whose_rows_were_deleted_is_computed_again(target: Decoder, tmp_path: Path) -> None:
    cache = WorkCache(SPEC, tmp_path)
    plan = make_plan(range(3))
    fill(target, cache, plan)
    (cache.path(plan.row_ids) / ROWS).unlink()
    assert fill(target, WorkCache(SPEC, tmp_path), plan) == 3


def test_bytes_that_the_dvc_cache_shares_go_there_too(
    target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache, plan = WorkCache(SPEC), make_plan(range(3))
    fill(target, cache, plan)
    rows = cache.path(plan.row_ids) / ROWS
    Path(".dvc/cache/files").mkdir(parents=True)
    os.link(rows, ".dvc/cache/files/0a")
    Path(".dvc/cache/files/0b").write_bytes(b"another file")
    flip(rows, 1000)
    assert WorkCache(SPEC).heal([plan])
    assert [p.name for p in Path(".dvc/cache/files").iterdir()] == ["0b"]
    assert len(list(Path(".cache/quarantine").glob(f"*/{ROWS}"))) == 1


def test_a_rate_is_remembered_by_device_and_a_damaged_note_of_it_is_none(tmp_path: Path) -> None:
    assert remembered_rate(tmp_path, "cpu") is None
    remember_rate(tmp_path, "cpu", 12.5)
    assert remembered_rate(tmp_path, "cpu") == 12.5 and remembered_rate(tmp_path, "an accelerator") is None
    (tmp_path / "rate.json").write_text("12")
    assert remembered_rate(tmp_path, "cpu") is None
