"""What a registry needs of the place where it stands: few operations, each whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.contracts.errors import LineError
from stages.contracts.params import Registry


class StoreError(LineError):
    """The store did not do what was asked: not reached, not allowed, too slow, full. What was whole before still is."""


class Garbled(StoreError):
    """All bytes of an object came, and by the store's own checksum they are others than it has: worth another reading."""


@dataclass(frozen=True)
class Found:
    """A small object and the version that a conditional write has to name."""

    data: bytes
    version: str


@dataclass(frozen=True)
class Listed:
    """An object in a listing; modified_s: seconds since the epoch, by the store's own clock."""

    key: str
    size_bytes: int
    modified_s: float


class Store(Protocol):
    """Keys are paths with `/`. Every operation raises StoreError in words after its bounded retries."""

    @property
    def where(self) -> str:
        """The store for a person: a folder, or s3://bucket/prefix."""
        ...

    def read(self, key: str) -> Found | None:
        """A small object, or none."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object that must not be there yet; False when another one is, and it stays. Equal bytes are ours."""
        ...

    def replace(self, key: str, data: bytes, version: str) -> bool:
        """Write over exactly this version; False when the object is another by now, and it stays."""
        ...

    def look(self, key: str) -> Listed | None:
        """Size and time of an object, or none."""
        ...

    def listing(self, prefix: str) -> list[Listed]:
        """All objects below a prefix, in the order of their keys."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file under a key of its content; a reader sees all of it or nothing. Goes on where a killed one stopped."""
        ...

    def stream(self, key: str) -> Iterator[bytes]:
        """The bytes of an object in pieces."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that is gone already is as well."""
        ...

    def sweep(self, older_than_s: float) -> list[str]:
        """Remove what unfinished uploads left longer ago than this; names them."""
        ...


def open_store(settings: Registry, root: Path) -> Store:
    """The store that params.yaml names; nothing is asked of it yet."""
    if settings.uri.startswith("s3://"):
        from flows.registry.s3 import S3Store

        return S3Store.connect(settings)
    from flows.registry.folder import FolderStore

    return FolderStore(root / settings.uri)
