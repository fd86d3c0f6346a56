"""Digests of streams, and each file hashed once however many names it has."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

Found = TypeVar("Found")
_READ = 1 << 22


@dataclass(frozen=True)
class Hashes:
    """Of the same bytes: sha256 as this line writes it, md5 as DVC writes it."""

    sha256: str
    md5: str
    size: int


def hashes(file: BinaryIO) -> Hashes:
    """Read to the end."""
    sha, md5, size = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
    while piece := file.read(_READ):
        sha.update(piece)
        md5.update(piece)
        size += len(piece)
    return Hashes("sha256:" + sha.hexdigest(), md5.hexdigest(), size)


class Hashed:
    """Remembers by inode: the workspace and DVC's cache are hard links of one another."""

    def __init__(self, advance: Callable[[float], None] = lambda amount: None) -> None:
        self._known: dict[tuple[object, ...], object] = {}
        self.advance = advance

    def of(self, path: Path) -> Hashes:
        """Raises: FileNotFoundError."""
        return self.once(path, "whole", lambda: self._whole(path))

    def once(self, path: Path, what: object, look: Callable[[], Found]) -> Found:
        """What `look` found in this file, looked at once."""
        at = os.stat(path)
        key = (at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, what)
        if key not in self._known:
            self._known[key] = look()
            self.advance(at.st_size)
        found: Found = self._known[key]  # type: ignore[assignment]
        return found

    def _whole(self, path: Path) -> Hashes:
        with path.open("rb") as file:
            return hashes(file)
