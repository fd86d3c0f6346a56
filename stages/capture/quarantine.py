"""Where bytes go that were found damaged: kept as they are, the reason beside them, out of every reader's way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from stages.contracts.damage import Damage
from stages.contracts.errors import DataError
from stages.contracts.files import canonical, digest, whole_folder
from stages.contracts.manifest import CaptureManifest

DVC_CACHE = Path(".dvc/cache")
REASON = "reason.json"


def quarantine(path: Path, damages: Sequence[Damage], to: Path) -> Path:
    """Keep the files of `path` (a folder, or one file) below `to`, with `reason.json`; `path` itself is left to the caller.

    The place is named after what was found, so that the same damage is kept once. Files are linked where they can be.
    DVC's cache holds the same damaged file under the name of the sound one and would hand it out again: it goes from there.
    """
    reason = canonical([damage.facts() for damage in damages])
    kept = to / f"{path.name}-{digest(reason).removeprefix('sha256:')[:12]}"
    files = [path] if path.is_file() else sorted(path.iterdir())
    if not kept.exists():
        with whole_folder(kept) as aside:
            for file in files:
                link_or_copy(file, aside / file.name)
            (aside / REASON).write_bytes(reason)
    for file in files:
        _drop_dvc_copy(file)
    return kept


def keep_unreadable(manifest: Path, to: Path) -> list[Damage]:
    """Keep a store's manifest that cannot be read, before another is written in its place."""
    try:
        CaptureManifest.read(manifest)
    except DataError as error:
        if manifest.is_file():
            damages = [Damage(manifest.name, error.what, error.expected, error.got, "it is written again by extract")]
            quarantine(manifest, damages, to)
            return damages
    return []


def inode(file: Path) -> tuple[int, int]:
    """Device and inode; of no file, what no file has."""
    try:
        told = file.stat()
    except FileNotFoundError:
        return (0, 0)
    return told.st_dev, told.st_ino


def _drop_dvc_copy(file: Path) -> None:
    told = file.stat()
    if told.st_nlink < 2 or not DVC_CACHE.is_dir():
        return
    for folder, _, names in os.walk(DVC_CACHE):
        for name in names:
            copy = Path(folder, name)
            if os.path.samestat(copy.lstat(), told):
                copy.unlink()


def link_or_copy(source: Path, to: Path) -> None:
    """Hard-link, or copy where the file system will not (another device, no links)."""
    try:
        os.link(source, to)
    except OSError:
        shutil.copyfile(source, to)
