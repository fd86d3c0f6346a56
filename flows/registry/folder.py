"""A registry in a folder of this machine, or one that several share: conditional writes are a comparison and a rename
under a lock that the kernel frees when its holder is killed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from flows.held import held
from flows.registry.store import Found, Listed, StoreError
from stages.contracts.files import copy_whole, digest, write_whole

_PIECE = 1 << 22
_LOCK_WAIT_S = 60.0


class FolderStore:
    """Objects as files below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        return str(self._folder)

    def _path(self, key: str) -> Path:
        return self._folder / key

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One conditional write at a time; held for a comparison and a rename, so nobody waits for long.

        Raises:
            StoreError: another process holds it for too long.
        """
        with held(
            self._folder / ".writes.lock", _LOCK_WAIT_S, StoreError, "Another promotion or rollback is under way"
        ):
            yield

    def read(self, key: str) -> Found | None:
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        return Found(data, digest(data))

    def create(self, key: str, data: bytes) -> bool:
        with self._locked():
            there = self.read(key)
            if there is None:
                write_whole(self._path(key), data)
        return there is None or there.data == data

    def replace(self, key: str, data: bytes, version: str) -> bool:
        with self._locked():
            there = self.read(key)
            if there is None or there.version != version:
                return False
            write_whole(self._path(key), data)
        return True

    def look(self, key: str) -> Listed | None:
        try:
            found = self._path(key).stat()
        except FileNotFoundError:
            return None
        return Listed(key, found.st_size, found.st_mtime)

    def listing(self, prefix: str) -> list[Listed]:
        folder = self._path(prefix)
        names = (
            sorted(str(p.relative_to(self._folder)) for p in folder.rglob("*") if _whole(p)) if folder.exists() else []
        )
        return [found for name in names if (found := self.look(name)) is not None]

    def put_file(self, key: str, path: Path) -> None:
        copy_whole(path, self._path(key))

    def stream(self, key: str) -> Iterator[bytes]:
        try:
            with self._path(key).open("rb") as file:
                while piece := file.read(_PIECE):
                    yield piece
        except FileNotFoundError:
            raise StoreError(
                "The registry has no such object",
                where=str(self._path(key)),
                do="put the folder back from a backup, or promote the draft again",
            ) from None

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def sweep(self, older_than_s: float) -> list[str]:
        before = time.time() - older_than_s
        parts = (p for name in ("blobs", "records") for p in self._path(name).glob(".*.part"))
        left = [p for p in parts if p.stat().st_mtime < before]
        for path in left:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return [str(p) for p in left]


def _whole(path: Path) -> bool:
    """Whether this is an object, not what a write keeps beside it while it is under way."""
    return path.is_file() and not path.name.startswith(".")
