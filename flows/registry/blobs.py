"""Files by their sha256. What a store says of its bytes is not believed: every blob is read back and digested here."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from flows.registry.store import Garbled, Store
from stages.contracts.errors import DataError

_ROUNDS = 3  # of an upload or download whose bytes came out wrong


def blob_key(digest: str) -> str:
    return f"blobs/{digest.removeprefix('sha256:')}"


def digest_of(store: Store, key: str) -> str:
    """sha256 of an object's bytes as they come from the store; no digest where they were garbled on the way."""
    sha = hashlib.sha256()
    try:
        for piece in store.stream(key):
            sha.update(piece)
    except Garbled:
        return "garbled on the way"
    return "sha256:" + sha.hexdigest()


def put_blob(store: Store, path: Path, digest: str, grace_s: float) -> None:
    """Bring a file into the store and read it back. One that is there is read back too, and written anew when it is old
    enough that retention might be about to remove it.

    Raises:
        DataError: the bytes read back are others, every time.
        StoreError: see Store.
    """
    key = blob_key(digest)
    there = store.look(key)
    fresh = there is not None and there.modified_s > time.time() - grace_s / 2
    found = ""
    for again in range(_ROUNDS):
        if again or not fresh:
            store.put_file(key, path)
        for _ in range(_ROUNDS):  # the way back may have done it
            found = digest_of(store, key)
            if found == digest:
                return
    raise DataError(
        "The registry's store gives back other bytes than were written",
        where=f"{store.where}/{key}",
        expected=digest,
        got=found,
        do="do not use this store until its disk, its network or what stands between is mended",
    )


def get_blob(store: Store, digest: str, to: Path) -> None:
    """Write a blob's bytes to the new file `to`, once they are known to be its own.

    Raises:
        DataError: missing or altered in the store, every time it was read.
        StoreError: see Store.
    """
    key = blob_key(digest)
    found = ""
    for _ in range(_ROUNDS):
        found = _write(store, key, to)
        if found == digest:
            return
        to.unlink()
    raise DataError(
        "A file of the release was altered in the registry",
        where=f"{store.where}/{key}",
        expected=digest,
        got=found,
        do="restore it from a version or a backup of the store, or promote the draft again",
    )


def _write(store: Store, key: str, to: Path) -> str:
    """Write an object's bytes to a file; gives their digest, or none where they were garbled on the way."""
    sha = hashlib.sha256()
    with to.open("wb") as out:
        try:
            for piece in store.stream(key):
                sha.update(piece)
                out.write(piece)
        except Garbled:
            return "garbled on the way"
        out.flush()
        os.fsync(out.fileno())
    return "sha256:" + sha.hexdigest()
