"""What a write keeps beside its path while it is under way, `.name.<pid>.part` and `.name.<pid>.old`, and what a killed
writer left there.

A folder cannot be renamed over one that has files, so Linux is asked to exchange the two names in one step. Where it
will not (another system, some network file systems), two renames do it, and a kill between them leaves only `.old`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_KINDS = ("part", "old")


def aside_of(path: Path, kind: str) -> Path:
    """The name beside `path` that this process writes to (`part`) or moves the old content to (`old`)."""
    return path.with_name(f".{path.name}.{os.getpid()}.{kind}")


def sweep(path: Path) -> None:
    """Put right what killed writers of `path` left: old content whose place is empty goes back, the rest goes.

    This process's own names count as left over: it has not begun, and in a container the process before had its pid.
    """
    left = _left(path)
    old = [p for p in left if p.suffix == ".old"]
    if old and not os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):  # another writer put it back first
            max(old, key=lambda p: p.lstat().st_ctime_ns).rename(path)
    for stray in left:
        remove(stray)


def _left(path: Path) -> list[Path]:
    named = re.compile(re.escape(f".{path.name}.") + rf"(\d+)\.({'|'.join(_KINDS)})")
    found = ((named.fullmatch(name), path.with_name(name)) for name in os.listdir(path.parent))
    return [stray for match, stray in found if match and not _writes(int(match[1]))]


def _writes(pid: int) -> bool:
    """Whether another process of this number is alive."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def replace_folder(aside: Path, path: Path) -> None:
    """Give `aside` the name `path`, whose content, if any, is removed once the new one stands there."""
    if not os.path.lexists(path):
        aside.rename(path)
    elif exchange(aside, path):
        remove(aside)
    else:
        old = aside_of(path, "old")
        path.rename(old)
        try:
            aside.rename(path)
        except OSError:
            old.rename(path)
            raise
        remove(old)


def exchange(one: Path, other: Path) -> bool:
    """Let two paths swap names in one step; False where that cannot be done, and both are as they were."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, TypeError, AttributeError):  # no Linux, or a C library without it
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def discard(path: Path) -> None:
    """Remove a whole folder: it loses its name before its files, so that nothing half removed is taken for whole.

    What a kill leaves is a `.part`, never an `.old`, which `sweep` would put back.
    """
    sweep(path)
    if os.path.lexists(path):
        aside = aside_of(path, "part")
        path.rename(aside)
        remove(aside)


def remove(path: Path) -> None:
    """Remove a file or a folder as far as it can be: what is left is swept by the next write."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
