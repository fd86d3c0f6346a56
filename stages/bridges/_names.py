"""Names in a file, without its values: keys and globals of a pickle read opcode by opcode, never run; a header's keys."""

from __future__ import annotations

import io
import json
import lzma
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_MAX_PICKLE = 16 << 20
_MAX_HEADER = 100 << 20
_MAX_JSON = 256 << 20
_PICKLES_ON_END = 5  # magic, protocol, system, value, storage keys: the form of torch.save before its archives
_TEXT = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}


@dataclass(frozen=True)
class SampleNames:
    """keys: of the dict that a sample is (texts of the pickle, or tensors of the header); globals: what a pickle would
    import, as "module name"; fault: why nothing could be read."""

    keys: frozenset[str] = frozenset()
    globals: frozenset[str] = frozenset()
    fault: str = ""


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none that can be read."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_JSON:
            return None
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def names_in(path: Path) -> SampleNames:
    """Names in a .safetensors, or in a file of torch.save; a fault in words when it is neither or cut off."""
    try:
        if path.stat().st_size == 0:
            return SampleNames(fault="a file of zero bytes")
        if path.suffix == ".safetensors":
            return SampleNames(keys=frozenset(header_of(path)) - {"__metadata__"})
        if path.suffix == ".gz":
            return SampleNames()
        with path.open("rb") as file:
            return names_of_pickle(_pickle(file))
    except (OSError, ValueError, zipfile.BadZipFile, KeyError, RuntimeError, zlib.error, lzma.LZMAError) as error:
        return SampleNames(fault=str(error) or type(error).__name__)


def header_of(path: Path) -> dict[str, Any]:
    """The header of a .safetensors.

    Raises:
        ValueError: cut off, or no header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
        if not 0 < length <= min(size - 8, _MAX_HEADER):
            raise ValueError(f"no safetensors header in its {size} bytes")
        value = json.loads(file.read(length))
    if not isinstance(value, dict):
        raise ValueError("a safetensors header that is no object")
    return value


def _pickle(file: BinaryIO) -> BinaryIO:
    """The pickle of a torch.save file: data.pkl of the archive, or the file itself in the old form."""
    if file.read(4) != b"PK\x03\x04":
        file.seek(0)
        return io.BytesIO(file.read(_MAX_PICKLE))
    with zipfile.ZipFile(file) as archive:
        name = next((n for n in archive.namelist() if n.endswith("data.pkl")), None)
        if name is None or archive.getinfo(name).file_size > _MAX_PICKLE:
            raise ValueError("an archive without a data.pkl of sensible size")
        return io.BytesIO(archive.read(name))


def names_of_pickle(file: BinaryIO) -> SampleNames:
    """Texts and globals of one pickle, or of several on end as the old form of torch.save has them.

    Raises:
        ValueError: this is no pickle, or it is cut off.
    """
    keys: set[str] = set()
    imports: set[str] = set()
    recent: list[str] = []
    for name, value in _opcodes(file):
        if name in _TEXT:
            keys.add(value)
            recent = [*recent[-1:], value]
        elif name in ("GLOBAL", "INST"):
            imports.add(value)
        elif name == "STACK_GLOBAL":
            imports.add(" ".join(recent))
    return SampleNames(frozenset(keys), frozenset(imports))


def _opcodes(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    for i in range(_PICKLES_ON_END):
        first = file.read(1)
        if i and first != b"\x80":
            return
        file.seek(-1 if first else 0, io.SEEK_CUR)
        for opcode, value, _ in pickletools.genops(file):
            yield opcode.name, value
