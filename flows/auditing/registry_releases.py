"""Releases as the registry holds them, read where they stand: nothing is brought into this clone, an audit leaves no trace."""

from __future__ import annotations

import hashlib
import io
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, cast

from flows.auditing.facts import fact_of, files_of
from flows.auditing.releases import RECORD, FolderReleases, Releases
from flows.ledger import LEDGER
from flows.registry import channels, parcels
from flows.registry.blobs import blob_key
from flows.registry.store import Garbled, Store
from stages.contracts.errors import DataError
from stages.contracts.release import POINTER, RELEASES, ReleaseRecord

_ROUNDS = 3  # of a download whose bytes came out wrong
_IN_MEMORY = 1 << 26
_SMALL = 1 << 20  # asked for more than once: a record is checked, then read; releases share their row folders' configs


class RegistryReleases:
    """The records of a registry and the blobs that they name. Its lists are read once: an audit tells of one moment."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[str, bytes] = {}
        self._small: dict[str, bytes] = {}
        self._names: list[str] | None = None
        self._sizes: dict[str, int] | None = None

    def names(self) -> list[str]:
        """Raises: StoreError: the registry does not answer, or not to this user."""
        if self._names is None:
            keys = [listed.key for listed in self._store.listing("records/")]
            self._names = [key.removeprefix("records/").removesuffix(".json") for key in keys]
        return self._names

    def files(self, name: str) -> list[str]:
        held = self._held()
        return [RECORD, *sorted(file for file, about in self._files(name).items() if blob_key(about) in held)]

    def size_bytes(self, name: str) -> int:
        held = self._held()
        return sum(held.get(blob_key(about), 0) for about in self._files(name).values())

    def open(self, name: str, file: str) -> BinaryIO:
        """Digested on the way, and asked for again where it came out wrong. Bytes that are wrong every time are given as they
        came, for the audit to name.

        Raises:
            FileNotFoundError: the record does not name it, or the registry does not hold it.
            StoreError: see Store.
        """
        if file == RECORD:
            return io.BytesIO(self._record(name))
        about = self._files(name).get(file)
        if about is None or blob_key(about) not in self._held():
            raise FileNotFoundError(self.where(name, file))
        if about in self._small:
            return io.BytesIO(self._small[about])
        return self._fetched(about)

    def where(self, name: str, file: str = "") -> str:
        record = f"{self._store.where}/{parcels.record_key(name)}"
        if file in ("", RECORD):
            return record
        about = self._files(name).get(file)
        return f"{self._store.where}/{blob_key(about)}" if about else f"{record}: {file}"

    def pointers(self) -> dict[str, str]:
        now = channels.standing(self._store, "production")
        return {} if now is None else {"current": now.entry.release}

    def history(self) -> list[dict[str, Any]]:
        return [entry.model_dump(mode="json") for entry in channels.entries(self._store, "production")]

    def _held(self) -> dict[str, int]:
        """Every blob's key and size in bytes."""
        if self._sizes is None:
            self._sizes = {listed.key: listed.size_bytes for listed in self._store.listing("blobs/")}
        return self._sizes

    def _record(self, name: str) -> bytes:
        """A record's bytes; those of an altered one as they are.

        Raises:
            FileNotFoundError: there is none.
        """
        if name not in self._records:
            try:
                self._records[name] = parcels.read_record(self._store, name).canonical()
            except DataError as error:
                found = self._store.read(parcels.record_key(name))
                if found is None:
                    raise FileNotFoundError(error.where) from error
                self._records[name] = found.data
        return self._records[name]

    def _files(self, name: str) -> dict[str, str]:
        """What a record names; nothing where it cannot be read."""
        try:
            record = fact_of(ReleaseRecord, self._record(name))
        except FileNotFoundError:
            return {}
        return files_of(record) if record else {}

    def _fetched(self, about: str) -> BinaryIO:
        for last in [*[False] * (_ROUNDS - 1), True]:
            file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 (the caller closes it)
            sha = hashlib.sha256()
            try:
                for piece in self._store.stream(blob_key(about)):
                    sha.update(piece)
                    file.write(piece)
            except Garbled:  # all of it came
                pass
            good = "sha256:" + sha.hexdigest() == about
            if good or last:
                small = good and file.tell() <= _SMALL
                file.seek(0)
                if small:
                    self._small[about] = file.read()
                    file.seek(0)
                return cast("BinaryIO", file)
            file.close()
        raise AssertionError("the last round returns")


class NearestReleases:
    """releases/ of this clone, and the registry for what it lacks. A release that stands here is read here alone, so that what
    was done to this copy is told; the registry's own bytes are looked at beside (flows/auditing/registered.py)."""

    def __init__(self, root: Path, store: Store) -> None:
        self._root, self._here, self._far = root, FolderReleases(root), RegistryReleases(store)

    def _of(self, name: str) -> Releases:
        return self._here if (self._root / RELEASES / name).is_dir() else self._far

    def _who(self) -> Releases:
        """Who tells which release is current and how it became that: this clone, once it followed."""
        noted = any((self._root / path).exists() for path in (POINTER, LEDGER))
        return self._here if noted else self._far

    def names(self) -> list[str]:
        """Raises: StoreError: see RegistryReleases."""
        return sorted({*self._here.names(), *self._far.names()})

    def files(self, name: str) -> list[str]:
        return list(self._of(name).files(name))

    def size_bytes(self, name: str) -> int:
        return self._of(name).size_bytes(name)

    def open(self, name: str, file: str) -> BinaryIO:
        return self._of(name).open(name, file)

    def where(self, name: str, file: str = "") -> str:
        return self._of(name).where(name, file)

    def pointers(self) -> dict[str, str]:
        """Raises: DataError: as the protocol says, or the release that this clone serves does not stand here."""
        found = self._who().pointers()
        if self._who() is self._here and found.get("current") not in (None, *self._here.names()):
            raise DataError(
                "The pointer `current` names a release that is not there",
                where=str(self._root / POINTER),
                expected=f"one of {', '.join(self._here.names()) or 'none'}",
                got=found["current"],
                do="`python -m flows.release follow` brings the release that is production here, and points at it",
            )
        return found

    def history(self) -> list[dict[str, Any]]:
        return self._who().history()
