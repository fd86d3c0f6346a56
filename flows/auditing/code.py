"""Which commit holds the code that made a release, proved by hashing: the md5 that DVC wrote down for each file and folder of
code, against the same computed from git's own objects.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.contracts.provenance import LOCK, LockedPath

_OUTSIDE = ("__pycache__/", ".pyc")  # .dvcignore


class Repository:
    """What the audit asks git; a folder that is no repository holds no commits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._md5s: dict[str, str] = {}

    def _git(self, *words: str) -> bytes:
        try:
            done = subprocess.run(["git", *words], cwd=self.root, capture_output=True, check=False)
        except FileNotFoundError:
            return b""
        return done.stdout if done.returncode == 0 else b""

    def commits(self, paths: list[str]) -> list[str]:
        """Every commit that changed one of `paths`, newest first."""
        return self._git("log", "--all", "--format=%H", "--", *paths).decode().split()

    def lock_of(self, sha256: str) -> bytes:
        """The dvc.lock of this digest, from any commit; empty when none has it."""
        for commit in self.commits([str(LOCK)]):
            data = self._git("show", f"{commit}:{LOCK}")
            if "sha256:" + hashlib.sha256(data).hexdigest() == sha256:
                return data
        return b""

    def revision_of(self, code: Sequence[LockedPath]) -> str:
        """The newest commit that holds all of `code` as DVC saw it; empty when none does."""
        paths = sorted({told.path for told in code})
        return next((c for c in self.commits(paths) if not self.differing(c, code)), "")

    def differing(self, commit: str, code: Sequence[LockedPath]) -> list[str]:
        """Paths of `code` whose bytes at this commit are not those that DVC saw; all of them when there is no such commit."""
        tree = self._tree(commit)
        return sorted({told.path for told in code if self._md5(tree, told) != told.md5})

    def _tree(self, commit: str) -> dict[str, str]:
        told = self._git("ls-tree", "-r", "-z", commit).decode()
        lines = (line.split("\t", 1) for line in told.split("\0") if line)
        return {path: head.split()[2] for head, path in lines}

    def _md5(self, tree: Mapping[str, str], told: LockedPath) -> str:
        if not told.is_folder:
            return self._of_blob(tree[told.path]) if told.path in tree else ""
        inside = {p.removeprefix(told.path + "/"): blob for p, blob in tree.items() if p.startswith(told.path + "/")}
        listed = [
            {"md5": self._of_blob(blob), "relpath": path}
            for path, blob in sorted(inside.items(), key=lambda item: tuple(item[0].split("/")))
            if not any(o in path for o in _OUTSIDE)
        ]
        return hashlib.md5(json.dumps(listed, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"

    def _of_blob(self, blob: str) -> str:
        if blob not in self._md5s:
            data = self._git("cat-file", "blob", blob)
            self._md5s[blob] = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return self._md5s[blob]
