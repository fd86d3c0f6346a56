"""Canonical bytes, digests, and writes that are whole or absent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.contracts._aside import aside_of, remove, replace_folder, sweep
from stages.contracts._aside import discard as discard
from stages.contracts.errors import DataError

FactT = TypeVar("FactT", bound="Fact")
_READ = 1 << 22


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no NaN, a final newline: equal values give equal bytes."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest(data: bytes) -> str:
    """`sha256:` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, read in pieces.

    Raises:
        DataError: the file is not there.
    """
    sha = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_READ):
                sha.update(piece)
    except FileNotFoundError as error:
        raise DataError(
            "A file is missing", where=str(path), do="run `dvc repro`, or `dvc pull` to fetch it"
        ) from error
    return "sha256:" + sha.hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _named(path: Path) -> Generator[None, None, None]:
    """Name `path` in an error of the system that names no file, as one of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write aside, fsync, rename: a reader sees the old bytes or the new ones, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    aside = aside_of(path, "part")
    try:
        with _named(path), aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        _fsync(path.parent)
    finally:
        remove(aside)


def copy_whole(source: Path, path: Path) -> None:
    """Copy a file aside, fsync, rename: a reader sees the old bytes or all of the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    aside = aside_of(path, "part")
    try:
        with _named(path):
            shutil.copyfile(source, aside)
            _fsync(aside)
        aside.replace(path)
        _fsync(path.parent)
    finally:
        remove(aside)


@contextlib.contextmanager
def whole_folder(path: Path) -> Generator[Path, None, None]:
    """Give a folder to fill; on a clean exit it is synced and takes the name `path`, on an exception it is removed.

    An existing `path` is replaced only once the new folder is complete. What a killed process left is swept first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    aside = aside_of(path, "part")
    aside.mkdir()
    try:
        with _named(path):
            yield aside
            for file in aside.rglob("*"):
                if file.is_file():
                    _fsync(file)
        replace_folder(aside, path)
        _fsync(path.parent)
    finally:
        remove(aside)


class Fact(BaseModel):
    """Something true of bytes: no clock, host or run id, so equal inputs give equal bytes and one digest."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def canonical(self) -> bytes:
        return canonical(self.model_dump(mode="json"))

    def digest(self) -> str:
        return digest(self.canonical())

    def write(self, path: Path) -> None:
        write_whole(path, self.canonical())

    @classmethod
    def read(cls: type[FactT], path: Path) -> FactT:
        """Read and validate a fact.

        Raises:
            DataError: missing, cut off, not of this schema, or not in the bytes that it was written in; every fault is
                named.
        """
        try:
            data = path.read_bytes()
            fact = cls.model_validate_json(data)
        except FileNotFoundError as error:
            raise DataError(
                f"No {cls.__name__} here",
                where=str(path),
                do="run `dvc repro`; `dvc status` tells which stage writes it",
            ) from error
        except OSError as error:
            raise DataError(
                f"The {cls.__name__} here cannot be read",
                where=str(path),
                expected="a file that this user may read",
                got=error.strerror or str(error),
                do="look at it with `ls -ld`; if it is no file, remove it and run `dvc repro`",
            ) from error
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, f['loc'])) or 'file'}: {f['msg']}" for f in error.errors())
            raise DataError(
                f"This is no valid {cls.__name__}",
                where=str(path),
                expected="the schema in stages/contracts",
                got=faults,
                do="remove the file and run `dvc repro`; it was cut off, edited, or written by another version",
            ) from error
        if (good := fact.canonical()) != data:
            at = next(
                (i for i, (a, b) in enumerate(zip(good, data, strict=False)) if a != b), min(len(good), len(data))
            )
            raise DataError(
                f"This {cls.__name__} is not in the bytes that it was written in",
                where=str(path),
                expected=f"{good[at : at + 20]!r} at byte {at}, as every fact is written",
                got=repr(data[at : at + 20]),
                do="remove the file and run `dvc repro`; it was damaged, edited, or written by another version",
            )
        return fact
