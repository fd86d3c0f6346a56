"""A run's record on a branch, beside whatever is checked out."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.git_state import GitError, commit_record
from tests.flows.samples import git


def _said(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "main")
    for name, text in (("params.yaml", "a: 1\n"), ("dvc.lock", "x\n"), ("code.py", "1\n"), ("reports/old.json", "{}")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "begin")
    return tmp_path


def test_the_record_goes_to_a_branch_and_nothing_else_is_touched(repo: Path) -> None:
    (repo / "params.yaml").write_text("a: 2\n")
    (repo / "reports/new.json").write_text("{}")
    (repo / "reports/old.json").unlink()
    (repo / "code.py").write_text("half done\n")
    git(repo, "add", "code.py")
    status = _said(repo, "status", "--porcelain")
    commit = commit_record("runs", "retrain: done", repo)
    assert commit == _said(repo, "rev-parse", "runs") and _said(repo, "rev-parse", "runs^") == _said(
        repo, "rev-parse", "main"
    )
    assert _said(repo, "show", "runs:params.yaml") == "a: 2" and _said(repo, "show", "runs:code.py") == "1"
    assert _said(repo, "ls-tree", "--name-only", "runs", "reports/") == "reports/new.json"
    assert _said(repo, "log", "-1", "--format=%s", "runs") == "retrain: done"
    assert _said(repo, "status", "--porcelain") == status
    assert commit_record("runs", "again", repo) is None


def test_on_the_branch_that_is_checked_out_the_files_show_as_committed(repo: Path) -> None:
    (repo / "dvc.lock").write_text("y\n")
    (repo / "code.py").write_text("half done\n")
    commit_record("main", "retrain: done", repo)
    assert _said(repo, "status", "--porcelain") == "M code.py"


def test_of_runs_that_commit_at_once_none_is_lost(repo: Path) -> None:
    def record(n: int) -> str | None:
        return commit_record("runs", f"run {n}", repo)

    (repo / "dvc.lock").write_text("y\n")
    first = record(0)
    (repo / "dvc.lock").write_text("z\n")
    with ThreadPoolExecutor(4) as pool:
        commits = list(pool.map(record, range(1, 5)))
    made = [c for c in [first, *commits] if c]
    assert sorted(_said(repo, "rev-list", "main..runs").split()) == sorted(made)


@pytest.mark.parametrize("branch", ["two words", "-x", "a..b"])
def test_a_name_that_no_branch_can_have_is_told(repo: Path, branch: str) -> None:
    with pytest.raises(GitError, match=r"could not record(.|\n)*commit_to"):
        commit_record(branch, "m", repo)


def test_a_folder_without_git_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(GitError, match=r"not a git repository"):
        commit_record("runs", "m", tmp_path)
