"""The work cache: resume, reuse by row, and no damaged byte used in silence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages.capture.rows import FolderPlan
from stages.capture.spill import capture_rows
from stages.capture.store import CONFIG, ROWS, RowFolder, write_folder
from stages.capture.work import WorkCache, link_or_copy
from stages.contracts.errors import Refusal
from stages.targets._decoder import Decoder
from tests.capture.conftest import SPEC, make_plan


def fill(target: Decoder, cache: WorkCache, plan: FolderPlan) -> int:
    """Finish `plan` in the cache; return how many rows went through the target."""
    missing = cache.missing(plan)
    if not cache.has(plan.row_ids):
        states = cache.states(plan, capture_rows(target, missing, SPEC.points, 64))
        cache.note(write_folder(cache.path(plan.row_ids), plan, SPEC, states))
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


@pytest.mark.parametrize("whole", [True, False])
def test_a_flipped_byte_is_refused_whether_the_folder_or_a_row_of_it_is_wanted(
    target: Decoder, tmp_path: Path, whole: bool
) -> None:
    cache = WorkCache(SPEC, tmp_path)
    plan = make_plan(range(4))
    fill(target, cache, plan)
    path = cache.path(plan.row_ids)
    data = bytearray((path / ROWS).read_bytes())
    data[len(data) // 2] ^= 4
    (path / ROWS).write_bytes(bytes(data))
    cache = WorkCache(SPEC, tmp_path)
    with pytest.raises(Refusal, match="work cache is damaged") as error:
        cache.link(plan, tmp_path / "out") if whole else fill(target, cache, make_plan(range(3, 6)))
    assert f"`rm -r {path}`" in error.value.do and "dvc repro extract" in error.value.do
    assert error.value.expected.startswith("sha256:") and error.value.got.startswith("sha256:")
    assert error.value.expected != error.value.got and not (tmp_path / "out").exists()


def test_what_the_refusal_says_to_do_mends_it_and_costs_only_that_folder(target: Decoder, tmp_path: Path) -> None:
    import shutil

    cache = WorkCache(SPEC, tmp_path)
    for part in (range(4), range(4, 8)):
        fill(target, cache, make_plan(part))
    shutil.rmtree(cache.path(make_plan(range(4)).row_ids))
    cache = WorkCache(SPEC, tmp_path)
    assert [fill(target, cache, make_plan(part)) for part in (range(4), range(4, 8))] == [4, 0]


@pytest.mark.parametrize("damage", ["config cut", "config of other rows", "rows cut"])
def test_a_damaged_cache_folder_is_refused_by_name(target: Decoder, tmp_path: Path, damage: str) -> None:
    cache = WorkCache(SPEC, tmp_path)
    plan, other = make_plan(range(3)), make_plan(range(3, 6))
    for p in (plan, other):
        fill(target, cache, p)
    path = cache.path(plan.row_ids)
    if damage == "config cut":
        (path / CONFIG).write_bytes((path / CONFIG).read_bytes()[:100])
    elif damage == "config of other rows":
        (path / CONFIG).write_bytes((cache.path(other.row_ids) / CONFIG).read_bytes())
    else:
        (path / ROWS).write_bytes((path / ROWS).read_bytes()[:-1])
    with pytest.raises(Refusal, match="work cache is damaged") as error:
        WorkCache(SPEC, tmp_path).link(plan, tmp_path / "out")
    assert f"`rm -r {path}`" in error.value.do


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


def test_bytes_that_the_dvc_cache_shares_have_to_go_there_too(
    target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = WorkCache(SPEC)
    plan = make_plan(range(3))
    fill(target, cache, plan)
    rows = cache.path(plan.row_ids) / ROWS
    Path(".dvc/cache/files").mkdir(parents=True)
    os.link(rows, ".dvc/cache/files/0a")
    data = rows.read_bytes()
    with rows.open("r+b") as file:
        file.write(bytes(reversed(data)))
    with pytest.raises(Refusal) as error:
        WorkCache(SPEC).link(plan, tmp_path / "out")
    command = error.value.do.split("`")[1]
    subprocess.run(command, shell=True, check=True)
    assert not rows.exists() and not Path(".dvc/cache/files/0a").exists()
