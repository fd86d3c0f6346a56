"""Promotion and rollback: whole or not at all, only what passed, and a history that can be walked back."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows import judged, release, working_copy
from flows.registry import channels, parcels
from stages.contracts.errors import DataError, Refusal
from stages.contracts.release import ReleaseRecord
from tests.flows.samples import gate_report, write_draft


def _pointer(root: Path) -> str:
    return json.loads((root / "releases/current.json").read_text())["release"]


def test_a_draft_that_passed_is_promoted_with_all_it_stands_on(tmp_path: Path) -> None:
    draft = write_draft(tmp_path)
    made = release.promote(tmp_path)
    folder = tmp_path / "releases" / made.name
    assert _pointer(tmp_path) == made.name == release.current(tmp_path)
    record = ReleaseRecord.read(folder / "release.json")
    assert record.draft_digest == draft.digest()
    assert record.accept_length_by_domain == {"coding": 1.6, "general": pytest.approx(1.4)}
    assert made.name == record.name and record.name in record.digest()
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {
        "release.json",
        "provenance/dvc.lock",
        "policy.json",
        *(f"serving/{f}.json" for f in ("sglang_adaptive", "vllm_speculative")),
        "index.html",
        "model_card.md",
        *(f"draft/{f}" for f in ("model.safetensors", "config.json", "draft_record.json")),
        *(f"evidence/{f}.json" for f in ("train", "serve_validate", "benchmark")),
        *(f"gates/{g}.json" for g in ("extraction", "training", "deployment")),
    }


def test_a_release_survives_damage_to_the_working_draft(tmp_path: Path) -> None:
    write_draft(tmp_path, b"good")
    made = release.promote(tmp_path)
    with (tmp_path / "models/draft/model.safetensors").open("r+b") as file:
        file.write(b"X")
    assert (tmp_path / "releases" / made.name / "draft/model.safetensors").read_bytes() == b"good"


def test_promoting_twice_changes_nothing(tmp_path: Path) -> None:
    write_draft(tmp_path)
    assert release.promote(tmp_path) == release.promote(tmp_path)
    assert [e["action"] for e in release.ledger(tmp_path)] == ["promote"]


@pytest.mark.parametrize("fault", ["failed", "other draft", "missing"])
def test_nothing_is_promoted_without_a_passing_report_on_exactly_this_draft(tmp_path: Path, fault: str) -> None:
    write_draft(tmp_path, b"old")
    old = release.promote(tmp_path).name
    draft = write_draft(tmp_path, b"new", passed=fault != "failed")
    path = tmp_path / "reports/gates/deployment.json"
    if fault == "other draft":
        gate_report("deployment", "sha256:" + "1" * 64).write(path)
    if fault == "missing":
        path.unlink()
    words = {
        "failed": "refused this(.|\n)*nearest point is the claimed one",
        "other draft": f"judged something else(.|\n)*{draft.digest()}",
        "missing": "has not judged this",
    }
    with pytest.raises(Refusal, match=words[fault]):
        release.promote(tmp_path)
    assert _pointer(tmp_path) == old
    assert len(list((tmp_path / "releases").glob("*/release.json"))) == 1


def test_figures_of_another_draft_are_refused(tmp_path: Path) -> None:
    write_draft(tmp_path, b"a")
    policy = (tmp_path / "reports/policy.json").read_bytes()
    write_draft(tmp_path, b"b")
    (tmp_path / "reports/policy.json").write_bytes(policy)
    with pytest.raises(Refusal, match=r"figures are of another draft\n  where: reports/policy.json"):
        release.promote(tmp_path)


@pytest.mark.parametrize("file", ["train.json", "serve_validate.json", "benchmark.json", "policy.json"])
def test_figures_changed_since_gate_deployment_passed_are_refused_and_the_file_named(tmp_path: Path, file: str) -> None:
    write_draft(tmp_path)
    path = tmp_path / "reports" / file
    path.write_text(path.read_text().replace("1.", "1.0", 1))
    words = rf"not those that gate-deployment judged\n  where: reports/{file}\n(.|\n)*dvc repro gate-deployment"
    with pytest.raises(Refusal, match=words):
        release.promote(tmp_path)
    assert release.current(tmp_path) is None


def test_a_report_that_says_passed_over_a_failed_check_is_no_report(tmp_path: Path) -> None:
    write_draft(tmp_path, passed=False)
    path = tmp_path / "reports/gates/deployment.json"
    path.write_text(path.read_text().replace(' "success": false,\n "version"', ' "success": true,\n "version"'))
    with pytest.raises(DataError, match=r"success is (.|\n)*its checks say otherwise"):
        release.promote(tmp_path)


def test_a_ledger_or_pointer_here_that_was_edited_is_written_anew_from_the_registry(tmp_path: Path) -> None:
    for weights in (b"a", b"b"):
        write_draft(tmp_path, weights)
        release.promote(tmp_path)
    ledger, pointer = tmp_path / "releases/ledger.jsonl", tmp_path / "releases/current.json"
    good = ledger.read_bytes(), pointer.read_bytes()
    for lines in (b"{broken\n", b"[]\n", b"", good[0].replace(b"promote", b"rollback", 1), good[0] * 2):
        ledger.write_bytes(lines)
        pointer.write_text('{"release": "gone"}')
        release.follow(tmp_path)
        assert (ledger.read_bytes(), pointer.read_bytes()) == good


@pytest.mark.parametrize("pointer", ["{", "[]", '{"release": 3}', '{"release": "../x"}', '{"other": "x"}'])
def test_a_pointer_that_promotion_did_not_write_is_named(tmp_path: Path, pointer: str) -> None:
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases/current.json").write_text(pointer)
    with pytest.raises(DataError, match=r"pointer cannot be read\n  where: .*releases/current.json"):
        release.current(tmp_path)


def test_weights_that_are_not_those_of_the_record_are_refused(tmp_path: Path) -> None:
    write_draft(tmp_path)
    (tmp_path / "models/draft/model.safetensors").write_bytes(b"weightz")
    with pytest.raises(DataError, match=r"not what its record says\n.*model.safetensors(.|\n)*dvc repro train"):
        release.promote(tmp_path)
    assert release.current(tmp_path) is None


def test_rollback_walks_back_through_the_releases_and_says_when_there_is_none(tmp_path: Path) -> None:
    names = []
    for weights in (b"a", b"b", b"c"):
        write_draft(tmp_path, weights)
        names.append(release.promote(tmp_path).name)
    assert release.rollback(tmp_path).name == names[1] == _pointer(tmp_path)
    assert release.rollback(tmp_path).name == names[0] == _pointer(tmp_path)
    with pytest.raises(Refusal, match=r"no release to roll back to(.|\n)*1 promoted"):
        release.rollback(tmp_path)
    write_draft(tmp_path, b"c")
    assert release.promote(tmp_path, even_if_rolled_back=True).name == names[2] == _pointer(tmp_path)
    assert release.rollback(tmp_path).name == names[0]
    assert [e["action"] for e in release.ledger(tmp_path)] == ["promote"] * 3 + ["rollback"] * 2 + [
        "promote",
        "rollback",
    ]


def test_a_rolled_back_draft_is_not_brought_back_by_the_next_run_but_by_a_person(tmp_path: Path) -> None:
    write_draft(tmp_path, b"a")
    good = release.promote(tmp_path).name
    write_draft(tmp_path, b"b")
    bad = release.promote(tmp_path).name
    release.rollback(tmp_path)
    with pytest.raises(Refusal, match=r"was rolled back\n(.|\n)*brings this one back on purpose"):
        release.promote(tmp_path)
    write_draft(tmp_path, b"b", accept_length=1.7)  # the same draft, measured again
    with pytest.raises(Refusal, match="was rolled back"):
        release.promote(tmp_path)
    assert _pointer(tmp_path) == good
    write_draft(tmp_path, b"b")
    assert release.promote(tmp_path, even_if_rolled_back=True).name == bad
    assert release.promote(tmp_path).name == bad


def test_rollback_mends_a_release_damaged_here_and_refuses_one_damaged_in_the_registry_too(tmp_path: Path) -> None:
    write_draft(tmp_path, b"a")
    first = release.promote(tmp_path)
    write_draft(tmp_path, b"b")
    second = release.promote(tmp_path).name
    here = tmp_path / "releases" / first.name / "draft/model.safetensors"
    here.write_bytes(b"?")
    digest = first.record.files["draft/model.safetensors"]
    blob = tmp_path / "releases/.registry/blobs" / digest.removeprefix("sha256:")
    blob.write_bytes(b"!")
    with pytest.raises(DataError, match=r"was altered in the registry\n(.|\n)*blobs/"):
        release.rollback(tmp_path)
    assert _pointer(tmp_path) == second and here.read_bytes() == b"?"
    blob.write_bytes(b"a")
    assert release.rollback(tmp_path).name == first.name == _pointer(tmp_path)
    assert here.read_bytes() == b"a"


def _promote_and_die(root: Path, where: str) -> None:
    """Ends this process without any clean-up before the named step."""
    module, name = {
        "copying": (judged.Contents, "write"),
        "uploading": (parcels, "put_blob"),
        "recording": (parcels, "missing"),
        "moving": (channels, "move"),
        "telling": (channels, "settle"),
        "noting": (working_copy, "follow"),
    }[where]
    setattr(module, name, lambda *_: os._exit(9))
    release.promote(root)


@pytest.mark.parametrize("where", ["copying", "uploading", "recording", "moving", "telling", "noting"])
def test_a_promotion_killed_anywhere_leaves_one_whole_release_current_and_can_be_done_again(
    tmp_path: Path, where: str
) -> None:
    write_draft(tmp_path, b"a")
    old = release.promote(tmp_path).name
    write_draft(tmp_path, b"b")
    dying = multiprocessing.get_context("fork").Process(target=_promote_and_die, args=(tmp_path, where))
    dying.start()
    dying.join(20)
    assert dying.exitcode == 9
    assert _pointer(tmp_path) == old, "what a server here loads moves last"
    release.follow(tmp_path)
    before = _pointer(tmp_path)
    assert (before == old) == (where != "noting")
    new = release.promote(tmp_path).name
    assert _pointer(tmp_path) == new != old
    assert [e["action"] for e in release.ledger(tmp_path)] == ["promote", "promote"]
    assert release.rollback(tmp_path).name == old


def test_a_pointer_that_moved_without_an_entry_is_told_by_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_draft(tmp_path, b"a")
    old = release.promote(tmp_path).name
    write_draft(tmp_path, b"b")
    new = release.promote(tmp_path).name
    (
        tmp_path / "releases/.registry/ledger/production/00000002.json"
    ).unlink()  # as a kill between the two writes leaves it
    assert [line.replace("*", "").split()[2] for line in release.list_releases(tmp_path).splitlines()] == [old, new]
    assert release.rollback(tmp_path).name == old
    assert sorted(p.name for p in (tmp_path / "releases/.registry/ledger/production").iterdir()) == [
        f"0000000{n}.json" for n in (1, 2, 3)
    ]


def test_a_second_writer_waits_and_then_says_who_must_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_draft(tmp_path)
    monkeypatch.setattr("flows.release._LOCK_WAIT_S", 0.3)
    with (
        release._locked(tmp_path),
        pytest.raises(Refusal, match=r"under way in this clone\n.*releases/.lock(.|\n)*within 0.3 s"),
    ):
        release.promote(tmp_path)
    assert release.promote(tmp_path).name == release.current(tmp_path)


def _promote(root: Path) -> None:
    release.promote(root)


def test_many_promotions_at_once_leave_one_release_and_one_entry(tmp_path: Path) -> None:
    write_draft(tmp_path)
    fork = multiprocessing.get_context("fork")
    racing = [fork.Process(target=_promote, args=(tmp_path,)) for _ in range(8)]
    for process in racing:
        process.start()
    for process in racing:
        process.join(30)
    assert [process.exitcode for process in racing] == [0] * 8
    assert len(release.ledger(tmp_path)) == 1


def test_the_list_marks_the_current_release(tmp_path: Path) -> None:
    write_draft(tmp_path, b"a")
    assert "No release yet" in release.list_releases(tmp_path)
    first = release.promote(tmp_path).name
    write_draft(tmp_path, b"b")
    second = release.promote(tmp_path).name
    lines = release.list_releases(tmp_path).splitlines()
    assert lines[0].startswith(" ") and first in lines[0]
    assert lines[1].startswith("*") and second in lines[1]


@pytest.mark.parametrize("action", ["list", "promote", "rollback"])
def test_outside_the_repository_a_command_says_so_and_makes_no_release_folder(
    tmp_path: Path, repo_root: Path, action: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.release", action],
        cwd=tmp_path,
        env={"PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and not done.stdout and not list(tmp_path.iterdir())
    assert "This is not the root of the repository" in done.stderr and "dvc.yaml" in done.stderr
