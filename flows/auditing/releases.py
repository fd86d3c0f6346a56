"""Where releases are read from. The audit asks for no more than this of a registry, a folder or a bucket."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pydantic import ValidationError

from flows import ledger
from stages.contracts.errors import DataError
from stages.contracts.files import canonical
from stages.contracts.release import POINTER, RELEASES, ChannelEntry, current

RECORD = "release.json"


class Releases(Protocol):
    """A store of releases. `name` is a release's name, the head of its record's digest."""

    def names(self) -> Sequence[str]:
        """All releases, in one order."""
        ...

    def files(self, name: str) -> Sequence[str]:
        """Every file of a release, by its path within it."""
        ...

    def size_bytes(self, name: str) -> int:
        """Bytes of all its files together."""
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

    def size_bytes(self, name: str) -> int:
        folder = self.root / RELEASES / name
        return sum((folder / file).stat().st_size for file in self.files(name))

    def open(self, name: str, file: str) -> BinaryIO:
        try:
            return (self.root / RELEASES / name / file).open("rb")
        except (NotADirectoryError, IsADirectoryError) as error:
            raise FileNotFoundError(str(error)) from error

    def where(self, name: str, file: str = "") -> str:
        return str(RELEASES / name / file)

    def pointers(self) -> dict[str, str]:
        name = current(self.root)
        path = self.root / POINTER
        if name is not None and path.read_bytes() != canonical({"release": name}):
            raise DataError(
                "The release pointer is not in the bytes that promotion writes",
                where=str(path),
                expected=repr(canonical({"release": name})),
                got=repr(path.read_bytes()[:80]),
                do="`python -m flows.release list` names the releases; promote or roll back to the right one",
            )
        return {} if name is None else {"current": name}

    def history(self) -> list[dict[str, Any]]:
        ledger.promoted(self.root)  # it walks: every entry follows from those before it
        entries = list(ledger.entries(self.root))
        path = self.root / ledger.LEDGER
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        for number, (entry, line) in enumerate(zip(entries, lines, strict=True), start=1):
            if json.dumps(entry).encode() != line or not _sealed(entry):
                raise DataError(
                    "A line of the ledger is not in the bytes that it was written in",
                    where=f"{path}: line {number}",
                    expected=json.dumps(entry),
                    got=line[:200].decode(errors="replace"),
                    do="put the ledger back from a backup",
                )
        return entries


def _sealed(entry: dict[str, Any]) -> bool:
    """Whether an entry is as its seal says; those made before there were registries have none."""
    try:
        return "seal" not in entry or bool(ChannelEntry.model_validate(entry))
    except ValidationError:
        return False
