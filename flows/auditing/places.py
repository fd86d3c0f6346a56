"""Where bytes that a release stands on may lie: the workspace, DVC's cache, a DVC remote; found by the release's own dvc.lock,
so that a release stays auditable after data/ has moved on.

The workspace counts only while its dvc.lock names the same bytes for that path: then a difference is an alteration, else it is
merely a newer run. A remote is asked for what lies nowhere nearer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from flows.auditing.bytes import Hashed, hashes
from flows.auditing.model import Copy
from flows.auditing.remotes import Remote, cache_folder
from stages.contracts.provenance import LOCK, Lock, LockedPath, read_lock

Found = TypeVar("Found")


@dataclass(frozen=True)
class Candidate:
    """A file that may be the one sought, and how to open it. `md5`: what DVC says of it, where DVC holds it by that name."""

    place: str
    where: str
    open: Callable[[], BinaryIO]
    path: Path | None = None
    md5: str = ""


class Places:
    """All that this machine can read of one release's bytes."""

    def __init__(self, root: Path, lock: Lock | None, remotes: Sequence[Remote], hashed: Hashed) -> None:
        self.root, self.lock, self.remotes, self.hashed = root, lock, remotes, hashed
        self._listings: dict[str, dict[str, str]] = {}
        self.faults: list[Copy] = []
        self.here = _workspace_lock(root)
        self.cache = cache_folder(root)

    def candidates(self, path: str) -> Iterator[Candidate]:
        """Every nearer copy of a file of the line, then those of the remotes where there is none nearer."""
        out = self.lock.out_of(path) if self.lock else None
        if out is None:
            return
        near = [*self._workspace(path, out), *self._cache(path, out)]
        yield from near
        if not near and (md5 := self.md5_of(path, out)):
            for remote in self.remotes:
                if (opened := remote.opener(md5)) is not None:
                    yield Candidate("remote", remote.where(md5), opened, md5=md5)

    def md5_of(self, path: str, out: LockedPath) -> str:
        """DVC's hash of one file; empty where the folder's listing is nowhere to be read."""
        if not out.is_folder:
            return out.md5
        return self.listing(out).get(str(Path(path).relative_to(out.path)), "")

    def listing(self, out: LockedPath) -> dict[str, str]:
        """Files of a folder as DVC lists them: path within it, and md5. A listing that is not what its name says is a
        fault of the place and is not used."""
        if out.md5 not in self._listings:
            self._listings[out.md5] = next(self._listed(out.md5), {})
        return self._listings[out.md5]

    def _listed(self, md5: str) -> Iterator[dict[str, str]]:
        path = self._in_cache(md5)
        sources: list[tuple[str, str, Callable[[], BinaryIO]]] = []
        if path.is_file():
            sources.append(("cache", self._named(path), lambda: path.open("rb")))
        for place, where, opened in [*sources, *self._far(md5)]:
            with opened() as file:
                data = file.read()
            got = _md5(data)
            if got + ".dir" != md5:
                self.faults.append(Copy(place, where, False, f"md5 {got}"))
                continue
            told: list[dict[str, Any]] = json.loads(data)
            yield {entry["relpath"]: entry["md5"] for entry in told}

    def _far(self, md5: str) -> Iterator[tuple[str, str, Callable[[], BinaryIO]]]:
        for remote in self.remotes:
            if (opened := remote.opener(md5)) is not None:
                yield "remote", remote.where(md5), opened

    def _workspace(self, path: str, out: LockedPath) -> Iterator[Candidate]:
        here = self.here.outs.get(out.path) if self.here else None
        file = self.root / path
        if here is not None and here.md5 == out.md5 and file.is_file():
            yield Candidate("workspace", path, lambda: file.open("rb"), file)

    def _cache(self, path: str, out: LockedPath) -> Iterator[Candidate]:
        md5 = self.md5_of(path, out)
        file = self._in_cache(md5)
        if md5 and file.is_file():
            yield Candidate("cache", self._named(file), lambda: file.open("rb"), file, md5)

    def _in_cache(self, md5: str) -> Path:
        return self.cache / md5[:2] / md5[2:]

    def _named(self, file: Path) -> str:
        return str(file.relative_to(self.root)) if file.is_relative_to(self.root) else str(file)

    def copies(self, path: str, expected: str) -> list[Copy]:
        """Every copy of a file whose sha256 is known."""
        return [self._checked(found, expected) for found in self.candidates(path)]

    def _checked(self, found: Candidate, expected: str) -> Copy:
        told = self.hashed.of(found.path) if found.path else _read(found)
        good = told.sha256 == expected and (not found.md5 or told.md5 == found.md5)
        return Copy(found.place, found.where, good, "" if good else told.sha256)

    def copies_by_md5(self, path: str) -> list[Copy]:
        """Every copy of a file that only DVC's lock names."""
        out = self.lock.out_of(path) if self.lock else None
        expected = self.md5_of(path, out) if out else ""
        if not expected:
            return []
        copies: list[Copy] = []
        for found in self.candidates(path):
            got = (self.hashed.of(found.path) if found.path else _read(found)).md5
            copies.append(Copy(found.place, found.where, got == expected, "" if got == expected else f"md5 {got}"))
        return copies

    def looked(self, path: str, what: object, look: Callable[[BinaryIO], list[str]]) -> list[Copy]:
        """Every copy of a file that `look` judges: the faults it names."""
        copies: list[Copy] = []
        for found in self.candidates(path):

            def opened(found: Candidate = found) -> list[str]:
                with found.open() as file:
                    return look(file)

            faults = self.hashed.once(found.path, what, opened) if found.path else opened()
            copies.append(Copy(found.place, found.where, not faults, ", ".join(faults[:3])))
        return copies

    def read(self, path: str, accept: Callable[[bytes], Found | None]) -> tuple[Found | None, list[Copy]]:
        """The first copy that `accept` takes, and what was found of each."""
        best: Found | None = None
        copies: list[Copy] = []
        for found in self.candidates(path):
            with found.open() as file:
                data = file.read()
            taken = accept(data)
            copies.append(Copy(found.place, found.where, taken is not None, "" if taken else "other bytes"))
            best = best if best is not None else taken
        return best, copies


def _workspace_lock(root: Path) -> Lock | None:
    try:
        return read_lock((root / LOCK).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _read(found: Candidate) -> Any:
    with found.open() as file:
        return hashes(file)
