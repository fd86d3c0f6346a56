"""How the flow runs a stage through DVC, and what it makes of the way the stage ends."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from flows import line
from flows.child import TimeLimit
from stages.contracts.errors import Refusal
from stages.contracts.report import report_path
from tests.flows.samples import ZERO, gate_report, make_repo


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    gate_report("training", ZERO, success=False).write(root / "refusing.json")
    graph = (
        "stages:\n"
        "  first: {cmd: 'echo made > a.txt', outs: [a.txt]}\n"
        "  gate-training:\n"
        "    cmd: mkdir -p reports/gates && cp refusing.json reports/gates/training.json && exit 1\n"
        "    deps: [a.txt]\n"
        "    outs: [{reports/gates/training.json: {cache: false}}]\n"
        "  refuses: {cmd: \"printf 'refused: Not this\\\\n  where: there\\\\nmore\\\\n' >&2; exit 1\"}\n"
        "  speaks: {cmd: \"printf 'error: A file is missing\\\\n  what to do: fetch it\\\\n' >&2; exit 2\"}\n"
        "  crashes: {cmd: 'echo half; kill -9 $$'}\n"
        "  slow: {cmd: 'echo $$ > slow.pid; sleep 60'}\n"
    )
    return make_repo(root, graph)


def _run(stage: str, repo: Path, limit_s: float = 60) -> list[str]:
    said: list[str] = []
    line.run_stage(stage, repo, limit_s, said.append)
    return said


def test_the_stages_are_those_of_dvc_in_its_order(repo: Path) -> None:
    assert line.stage_names(repo) == ["first", "gate-training", "refuses", "speaks", "crashes", "slow"]


def test_the_stages_of_this_repository_are_in_an_order_that_can_be_run(repo_root: Path) -> None:
    names = line.stage_names(repo_root)
    assert names[0] == "prepare" and names[-1] == "gate-deployment" and len(names) == 9


def test_a_folder_without_a_graph_is_told(tmp_path: Path) -> None:
    with pytest.raises(line.StageError, match=r"lists no stages\n.*dvc.yaml(.|\n)*from the repository root"):
        line.stage_names(tmp_path)


def test_a_stage_runs_once_and_is_skipped_after(repo: Path) -> None:
    assert any("Running stage 'first'" in said for said in _run("first", repo))
    assert any("didn't change" in said for said in _run("first", repo))


def test_stages_before_the_first_that_would_run_are_known_unchanged_at_once(repo: Path) -> None:
    _run("first", repo)
    names = line.stage_names(repo)
    assert line.unchanged(names, repo) == {"first"}
    (repo / "a.txt").write_text("other bytes\n")
    try:
        assert line.unchanged(names, repo) == frozenset()
    finally:
        (repo / "a.txt").write_text("made\n")


def test_where_dvc_does_not_answer_every_stage_is_asked(tmp_path: Path) -> None:
    assert line.unchanged(["first"], tmp_path) == frozenset()


def test_a_refusing_gate_is_a_refusal_in_the_words_of_its_report(repo: Path) -> None:
    with pytest.raises(Refusal) as told:
        _run("gate-training", repo)
    assert "gate-training refused the draft" in str(told.value)
    assert "nearest point is the claimed one: expected [3, 16, 28], got [0, 3, 16] (slot 0, slot 1)" in str(told.value)
    assert "capture again with the points of params.yaml" in str(told.value)


def test_an_old_refusal_on_disk_is_not_taken_for_this_run(tmp_path: Path) -> None:
    path = tmp_path / report_path("training")
    gate_report("training", ZERO, success=False).write(path)
    assert line.gate_report("training", tmp_path) is None
    assert line.gate_report("gate-training", tmp_path) is not None
    os.utime(path, (1000, 1000))
    assert line.gate_report("gate-training", tmp_path, since=2000) is None


def test_a_stage_that_refuses_or_speaks_is_told_in_its_words_and_is_no_crash(repo: Path) -> None:
    with pytest.raises(Refusal, match=r"^refuses: Not this\n  where: there$"):
        _run("refuses", repo)
    with pytest.raises(line.StageError, match=r"^speaks: A file is missing\n  what to do: fetch it$"):
        _run("speaks", repo)


def test_a_killed_stage_is_a_crash_with_its_last_lines(repo: Path) -> None:
    with pytest.raises(line.StageCrash, match=r"without a word(.|\n)*half(.|\n)*crashes"):
        _run("crashes", repo)


def test_a_stage_over_its_time_limit_is_gone_and_the_line_is_free_again(repo: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TimeLimit):
        _run("slow", repo, limit_s=6)
    assert time.monotonic() - began < 13
    assert not line._alive(int((repo / "slow.pid").read_text()))
    assert line.holders(repo) == []


def _hold(repo: Path, pid: int) -> Path:
    path = repo / ".dvc/tmp/rwlock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"write": {"/x/data": {"pid": pid, "cmd": "dvc repro"}}, "read": {}}))
    return path


def test_a_line_held_by_a_living_run_is_waited_for_with_a_bound_and_a_clear_word(tmp_path: Path) -> None:
    _hold(tmp_path, os.getpid())
    said: list[str] = []
    with pytest.raises(
        line.Busy, match=rf"Another run of DVC(.|\n)*PID {os.getpid()}: dvc repro(.|\n)*remove that file"
    ):
        line.wait_until_free(tmp_path, 0.5, said.append)
    assert said == [f"waiting for PID {os.getpid()}: dvc repro, at most 0.5 s"]


def test_the_wait_ends_when_the_other_run_does(tmp_path: Path) -> None:
    path = _hold(tmp_path, os.getpid())
    threading.Timer(0.5, lambda: path.write_text("{}")).start()
    line.wait_until_free(tmp_path, 20, lambda _: None)


def test_a_lock_left_by_a_dead_run_does_not_hold_the_line(tmp_path: Path) -> None:
    _hold(tmp_path, 2**22 - 3)
    line.wait_until_free(tmp_path, 0, lambda _: None)
