"""Where releases are read from. The audit asks for no more than this of a registry, a folder or a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from flows import ledger
from stages.contracts.release import RELEASES, current

RECORD = "release.json"


class Releases(Protocol):
    """A store of releases. `name` is a release's name, the head of its record's digest."""

    def names(self) -> Sequence[str]:
        """All releases, in one order."""
        ...

    def files(self, name: str) -> Sequence[str]:
        """Every file of a release, by its path within it."""
        ...

    def open(self, name: str, file: str) -> BinaryIO:
        """Raises: FileNotFoundError: the release has no such file."""
        ...

    def where(self, name: str, file: str = "") -> str:
        """In words, for a person to find it."""
        ...

    def pointers(self) -> dict[str, str]:
        """Which release each pointer names. Raises: DataError: a pointer cannot be read."""
        ...

    def history(self) -> list[dict[str, Any]]:
        """Who became current when, oldest first. Raises: DataError: it contradicts itself."""
        ...


class FolderReleases:
    """releases/ below a root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        folder = self.root / RELEASES
        return sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else []

    def files(self, name: str) -> list[str]:
        folder = self.root / RELEASES / name
        return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())

    def open(self, name: str, file: str) -> BinaryIO:
        try:
            return (self.root / RELEASES / name / file).open("rb")
        except (NotADirectoryError, IsADirectoryError) as error:
            raise FileNotFoundError(str(error)) from error

    def where(self, name: str, file: str = "") -> str:
        return str(RELEASES / name / file)

    def pointers(self) -> dict[str, str]:
        name = current(self.root)
        return {} if name is None else {"current": name}

    def history(self) -> list[dict[str, Any]]:
        ledger.promoted(self.root)  # it walks: every entry follows from those before it
        return list(ledger.entries(self.root))
