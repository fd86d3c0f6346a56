"""Releases in and out of a registry: files first, then the record that names them; the other way round on the way out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from flows.registry.blobs import blob_key, get_blob, put_blob
from flows.registry.store import Store
from stages.contracts.errors import DataError
from stages.contracts.files import file_digest, whole_folder
from stages.contracts.release import RECORD, ReleaseRecord

_READS = 4
_AT_ONCE = 8


def record_key(name: str) -> str:
    return f"records/{name}.json"


def described(folder: Path) -> dict[str, str]:
    """Every file below a folder, by its path there; its record is not one of them."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / RECORD)
    return {str(p.relative_to(folder)): file_digest(p) for p in paths}


def altered(folder: Path, record: ReleaseRecord) -> list[str]:
    """What of a release's folder is not as its record says: missing, altered, or not of it."""
    if not (folder / RECORD).exists():
        return [RECORD]
    here = described(folder)
    faults = [name for name in {*here, *record.files} if here.get(name) != record.files.get(name)]
    return sorted([*faults, *([RECORD] if (folder / RECORD).read_bytes() != record.canonical() else [])])


def put_release(store: Store, folder: Path, record: ReleaseRecord, grace_s: float) -> None:
    """Bring a whole release into the store, every file read back; the record is written after what it names.

    Raises:
        DataError: the store gives back other bytes, or another record stands under this name.
        StoreError: see Store.
    """
    for name, file in sorted(record.files.items()):
        put_blob(store, folder / name, file, grace_s)
    if not store.create(record_key(record.name), record.canonical()) and read_record(store, record.name) != record:
        raise DataError(
            "Another release stands in the registry under this name",
            where=f"{store.where}/{record_key(record.name)}",
            expected=record.digest(),
            do="restore that record from a version or a backup of the store",
        )
    read_record(store, record.name)
    for name in missing(store, record):  # retention may have removed what was old and unreached until now
        put_blob(store, folder / name, record.files[name], grace_s)


def missing(store: Store, record: ReleaseRecord) -> list[str]:
    """Files of a release that the store does not hold."""

    def lacks(name: str) -> bool:
        return store.look(blob_key(record.files[name])) is None

    names = sorted(record.files)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [name for name, gone in zip(names, pool.map(lacks, names), strict=True) if gone]


def read_record(store: Store, name: str) -> ReleaseRecord:
    """A release's record, known by its name to be the one that was written.

    Raises:
        DataError: missing, or altered every time it was read.
    """
    fault = "nothing"
    for _ in range(_READS):
        found = store.read(record_key(name))
        if found is None:
            break
        try:
            record = ReleaseRecord.model_validate_json(found.data)
        except ValidationError as error:
            fault = f"no record: {error.error_count()} faults"
            continue
        if record.canonical() == found.data and record.name == name:
            return record
        fault = f"a record whose digest is {record.digest()}"
    raise DataError(
        "The registry has no such release" if fault == "nothing" else "A release's record was altered",
        where=f"{store.where}/{record_key(name)}",
        expected=f"the record whose digest begins with {name}",
        got=fault,
        do="`python -m flows.release list` names the releases; retention removes those that nothing reaches any more"
        if fault == "nothing"
        else "restore it from a version or a backup of the store",
    )


def get_release(store: Store, name: str, to: Path) -> ReleaseRecord:
    """Write a release's folder whole: every file digested, the record last. A folder that is whole stays as it is.

    Raises:
        DataError: the release, or a file of it, is missing or altered in the store; `to` is as it was.
        StoreError: see Store.
    """
    record = read_record(store, name)
    if to.is_dir() and not altered(to, record):
        return record
    with whole_folder(to) as aside:
        for file, about in _within(record):
            (aside / file).parent.mkdir(parents=True, exist_ok=True)
            get_blob(store, about, aside / file)
        record.write(aside / RECORD)
    return record


def _within(record: ReleaseRecord) -> Iterator[tuple[str, str]]:
    """The record's files, none of which may lead out of the folder.

    Raises:
        DataError: one does.
    """
    for name, about in sorted(record.files.items()):
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise DataError("A release names a file outside its folder", where=record.name, got=name)
        yield name, about
