"""What a run came of and found, committed: params.yaml, dvc.lock and reports/ to a branch, beside whatever is checked out.

The commit is made with git's own plumbing and an index of its own, so that neither the working tree nor a half-staged
change of somebody else is touched, and the branch moves by compare-and-swap: of two runs that commit at once, the second
goes on top of the first.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stages.contracts.errors import LineError

RECORD = ("params.yaml", "dvc.lock", "reports")
_TRIES = 5
_AUTHOR = {"GIT_AUTHOR_NAME": "draftline", "GIT_AUTHOR_EMAIL": "draftline@localhost"}


class GitError(LineError):
    """Git could not record the run."""


def commit_record(branch: str, message: str, root: Path) -> str | None:
    """Commit RECORD as it stands to `branch`, which begins at HEAD when it is new. Gives the commit; None without changes.

    Raises:
        GitError: no repository, no such name for a branch, or others moved the branch all the time.
    """
    _git(root, "check-ref-format", "--branch", branch)
    ref = f"refs/heads/{branch}"
    for _ in range(_TRIES):
        parent = _try(root, "rev-parse", "--verify", "--quiet", ref)
        base = parent or _git(root, "rev-parse", "HEAD")
        tree = _tree(root, base)
        if parent and tree == _git(root, "rev-parse", f"{parent}^{{tree}}"):
            return None
        commit = _git(root, "commit-tree", tree, "-p", base, "-m", message)
        if _try(root, "update-ref", ref, commit, parent or "0" * 40) is not None:
            _follow(root, ref)
            return commit
    raise GitError(
        "The branch moved all the time", where=ref, do="commit by hand: `git add params.yaml dvc.lock reports`"
    )


def _tree(root: Path, base: str) -> str:
    """The tree of `base` with RECORD as it stands now."""
    with tempfile.TemporaryDirectory() as aside:
        index = {"GIT_INDEX_FILE": str(Path(aside) / "index")}
        _git(root, "read-tree", base, extra=index)
        there = [name for name in RECORD if (root / name).exists()]
        _git(root, "rm", "-r", "-f", "-q", "--cached", "--ignore-unmatch", "--", *RECORD, extra=index)
        _git(root, "add", "-f", "--", *there, extra=index)
        return _git(root, "write-tree", extra=index)


def _follow(root: Path, ref: str) -> None:
    """Where that branch is checked out, the real index takes the recorded files too: they would show as taken back."""
    if _try(root, "symbolic-ref", "-q", "HEAD") == ref:
        _git(root, "reset", "-q", "--", *RECORD)


def _git(root: Path, *words: str, extra: dict[str, str] | None = None) -> str:
    done = _run(root, words, extra or {})
    if done.returncode:
        raise GitError(
            "Git could not record this run",
            where=f"git {' '.join(words[:3])}",
            expected="a git repository, and the name of a branch in commit_to",
            got=done.stderr.strip() or f"exit code {done.returncode}",
            do="mend what git says, then commit params.yaml, dvc.lock and reports/ by hand",
        )
    return done.stdout.strip()


def _try(root: Path, *words: str) -> str | None:
    done = _run(root, words, {})
    return None if done.returncode else done.stdout.strip()


def _run(root: Path, words: Sequence[str], extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    committer = {name.replace("AUTHOR", "COMMITTER"): value for name, value in _AUTHOR.items()}
    env = _AUTHOR | committer | os.environ | extra
    return subprocess.run(["git", *words], cwd=root, env=env, capture_output=True, text=True, check=False)
