"""Opening one foreign file: never unpickling code, mapped where the format allows it, refused in words that name the file.

A file of torch.save is an archive whose members lie uncompressed, so a tensor of it is a view of the mapped file; the same
holds for safetensors. Only gzip and the old form of torch.save have to be read: the first goes through a temporary file
within a bound, the second through memory, one sample at a time.
"""

from __future__ import annotations

import contextlib
import gzip
import pickle
import shutil
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.bridges._names import header_of, names_in
from stages.contracts.errors import DataError

# What torch.save puts in the pickle of a dict of tensors, lists, numbers and texts. Anything else is code to be run.
_PLAIN = {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor", "collections OrderedDict", "torch Size"}
_STORAGE = ("torch ", "torch.storage ")
_KIND = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_PIECE = 1 << 20
_RATIO = 256  # of unpacked to packed bytes: gzip's most is 1032, padded states stay far below this
_FLOOR = 64 << 20  # unpacked bytes that need no excuse
_ALWAYS_FREE = 1 << 30  # of the disk that a .gz is unpacked to
_AGAIN = "fetch or extract this one again, or remove it: the other files are untouched"


def damaged(path: Path, what: str, *, got: str, expected: str = "", do: str = _AGAIN) -> DataError:
    """A fault of one file, in the house's words."""
    return DataError(what, where=str(path), expected=expected, got=got, do=do)


@contextlib.contextmanager
def sample(path: Path) -> Generator[dict[str, Any], None, None]:
    """The dict of tensors in `path`: .safetensors, a file of torch.save, or one in .gz.

    Tensors are views of the mapped file. What is unpacked from .gz is removed again when the block ends; views that are
    still held keep their bytes.

    Raises:
        DataError: no bytes, cut off, a pickle that would run code, no dict, or a .gz that unpacks beyond its bound.
    """
    if not path.is_file():
        raise damaged(path, "A file of the store is not there", got="no such file, or a link that leads nowhere")
    if path.stat().st_size == 0:
        raise damaged(path, "A file of the store is empty", got="0 bytes", expected="a sample")
    if path.suffix == ".safetensors":
        yield dict(mapped(path))
    elif path.suffix == ".gz":
        with _unpacked(path) as unpacked:
            yield archive(unpacked, path)
    else:
        yield archive(path, path)


def mapped(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors as views of the mapped file. Do not write to them.

    Raises:
        DataError: no header, or data that is not as long as the header says.
    """
    try:
        header = header_of(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        items = {
            n: (i["dtype"], tuple(i["shape"]), *i["data_offsets"]) for n, i in header.items() if n != "__metadata__"
        }
        for _, shape, begin, stop in items.values():
            if not all(type(i) is int and 0 <= i < 1 << 62 for i in (*shape, begin, stop)):
                raise ValueError(f"sizes and offsets that are no whole numbers: {shape}, {begin}, {stop}"[:200])
        end = start + max((stop for _, _, _, stop in items.values()), default=0)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(path, "A safetensors file has no header that can be read", got=str(error)) from error
    if end != size:
        raise damaged(
            path,
            "A safetensors file is cut off" if size < end else "A safetensors file is longer than its header says",
            expected=f"{end} bytes, by its header",
            got=f"{size} bytes",
        )
    raw = _bytes_of(path)
    return {name: _view(path, raw, name, start, item) for name, item in items.items()}


def _bytes_of(path: Path) -> Tensor:
    with warnings.catch_warnings():  # mapped read-only on purpose; torch has no read-only tensors and warns
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.memmap(path, np.uint8, mode="r"))


def _view(path: Path, raw: Tensor, name: str, start: int, item: tuple[Any, ...]) -> Tensor:
    kind, shape, begin, stop = item
    dtype = _KIND.get(kind)
    length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize if dtype else -1
    if dtype is None or not 0 <= begin <= stop or length != stop - begin:
        got = f"{name}: {kind} {list(shape)} in {stop - begin} bytes"
        raise damaged(path, "A safetensors header contradicts itself", got=got)
    part = raw[start + begin : start + stop]
    if (start + begin) % dtype.itemsize:  # foreign writers need not align
        part = part.clone()
    return part.view(dtype).view(shape) if length else torch.empty(shape, dtype=dtype)


def archive(path: Path, named: Path) -> dict[str, Any]:
    """The dict in a file of torch.save, tensors mapped. `named`: what to call the file in an error.

    Raises:
        DataError: cut off, no such file, code in its pickle, or no dict.
    """
    names = names_in(path)
    if names.fault:
        raise damaged(
            named,
            "A file of torch.save is cut off or damaged",
            expected="an archive that ends with its directory",
            got=f"{path.stat().st_size} bytes: {names.fault}",
        )
    _demand_data_only(names.globals, named)
    plain = zipfile.is_zipfile(path)
    if plain:
        _demand_stored(path, named)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=plain)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        EOFError,
        OSError,
        pickle.UnpicklingError,
    ) as error:
        told = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
        raise damaged(named, "A file of torch.save cannot be read", got=told) from error
    if not isinstance(value, dict):
        got = f"a {type(value).__name__}"
        raise damaged(named, "A file of torch.save holds no sample", expected="a dict of tensors", got=got)
    return value


def _demand_data_only(imports: frozenset[str], named: Path) -> None:
    strange = sorted(i for i in imports if i not in _PLAIN and not _is_storage(i))
    if not strange:
        return
    code = any(not s.startswith("torch") for s in strange)
    raise damaged(
        named,
        "A pickle in the store would run code, and was not opened"
        if code
        else "A file of the store holds something else than plain tensors, and was not opened",
        expected="tensors, lists, numbers and texts",
        got="it asks for " + ", ".join(s.replace(" ", ".") for s in strange[:5]),
        do="find out where this file comes from before anything opens it; then remove it" if code else _AGAIN,
    )


def _is_storage(name: str) -> bool:
    kind = name.rsplit(" ", 1)[-1]
    if not name.startswith(_STORAGE):
        return False
    return kind.endswith("Storage") or isinstance(getattr(torch, kind, None), torch.dtype)


def _demand_stored(path: Path, named: Path) -> None:
    """Raises DataError for an archive with compressed members: torch.save writes none, and what unpacks has no bound."""
    with zipfile.ZipFile(path) as file:
        packed = [i.filename for i in file.infolist() if i.compress_type != zipfile.ZIP_STORED]
    if packed:
        expected = "members as torch.save writes them, uncompressed"
        raise damaged(named, "An archive of the store is compressed", expected=expected, got=", ".join(packed[:3]))


def demand_crc(path: Path) -> None:
    """Read an archive of torch.save through and compare the sums that it was written with; other files have none.

    Raises:
        DataError: bytes changed since the file was written.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as file:
        for info in file.infolist():
            if not info.CRC:  # written without sums
                continue
            try:
                with file.open(info) as member:
                    while member.read(_PIECE):
                        pass
            except zipfile.BadZipFile as error:
                raise damaged(
                    path,
                    "A file of the store has other bytes than were written",
                    expected="the check sums in its own directory",
                    got=str(error),
                ) from error


@contextlib.contextmanager
def _unpacked(path: Path) -> Generator[Path, None, None]:
    """A .gz streamed to a temporary file, within a bound."""
    packed = path.stat().st_size
    most = max(packed * _RATIO, _FLOOR)
    with tempfile.TemporaryDirectory(prefix="bridge-") as folder:
        free = shutil.disk_usage(folder).free - _ALWAYS_FREE
        at, size = Path(folder) / path.stem, 0
        try:
            with gzip.open(path, "rb") as source, at.open("wb") as file:
                while piece := source.read(_PIECE):
                    size += len(piece)
                    _demand_bound(path, packed, size, most, free)
                    file.write(piece)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise damaged(path, "A .gz is cut off or damaged", got=f"{packed} bytes: {error}") from error
        if not size:
            raise damaged(path, "A .gz of the store is empty", got="0 bytes inside", expected="a sample")
        yield at


def _demand_bound(path: Path, packed: int, size: int, most: int, free: int) -> None:
    if size > most:
        raise damaged(
            path,
            "A .gz unpacks to more than states can, and was given up",
            expected=f"at most {most} bytes from {packed}",
            got=f"more than {size - 1}",
            do="find out where this file comes from; then remove it",
        )
    if size > free:
        raise damaged(
            path,
            "A .gz does not fit on the disk that it is unpacked to",
            expected=f"{size} bytes and more",
            got=f"{max(free, 0)} bytes to spare in {tempfile.gettempdir()}",
            do="set TMPDIR to a folder with more room",
        )
