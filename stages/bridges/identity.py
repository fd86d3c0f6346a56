"""What a foreign store is and which code reads it, as digests: states adopted from one are not served for another."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stages.bridges.stores import ForeignStore
from stages.contracts.files import canonical
from stages.contracts.progress import progress

_HEAD, _TAIL, _PAGE, _PAGES = 4096, 65536, 4096, 16


def fingerprint(store: ForeignStore) -> str:
    """sha256 over names, sizes, configs and a part of every file: a store of many hundred GB is not read twice.

    The end of a file of torch.save is its directory, which has a check sum of every tensor, and the end of a .gz is one of
    all its bytes, so there any change shows; a .safetensors has no sums, and pages spread over it stand for the rest.
    """
    sha = hashlib.sha256(canonical(store.configs))
    with progress(len(store.files), "what the store is", "files") as advance:
        for file in store.files:
            sha.update(canonical([file.path, file.bytes]))
            sha.update(_parts(store.root / file.path, file.bytes))
            advance()
    return "sha256:" + sha.hexdigest()


def _parts(path: Path, size: int) -> bytes:
    if not size:
        return b""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        sha.update(file.read(_HEAD))
        if path.suffix == ".safetensors":
            for page in range(_PAGES):
                file.seek(size * page // _PAGES)
                sha.update(file.read(_PAGE))
        file.seek(max(size - _TAIL, 0))
        sha.update(file.read(_TAIL))
    return sha.digest()


def bridge_digest(room: Path = Path(__file__).parent) -> str:
    """sha256 over the sources of this room: what lays foreign rows out."""
    sha = hashlib.sha256()
    for path in sorted(room.rglob("*.py")):
        sha.update(path.relative_to(room).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return "sha256:" + sha.hexdigest()
