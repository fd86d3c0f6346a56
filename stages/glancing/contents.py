"""Shapes and dtypes of one file's tensors, with no tensor read and nothing unpickled.

A safetensors file says them in its header. A file of torch.save says them in a pickle, whose opcodes are followed here on a
stack of plain values: a call is kept as a tuple and never made. Only opcodes that torch.save writes are known.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

_MAX_HEADER = 100 << 20
_MAX_PICKLE = 64 << 20
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
_STORAGES = {
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True)
class Shape:
    dtype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Contents:
    """What a file holds by name: a Shape, a list of them, or something else (kept as it was). fault: why it cannot be
    read; `end`: where its data ends by its own header, in bytes, 0 where that is not told."""

    tensors: Mapping[str, Any]
    fault: str = ""
    end: int = 0

    def shape(self, name: str) -> Shape | None:
        value = self.tensors.get(name)
        return value if isinstance(value, Shape) else None


def contents_of(path: Path) -> Contents:
    """Names, shapes and dtypes in a .safetensors, .pt, .ckpt or .gz of these."""
    try:
        if path.stat().st_size == 0:
            return Contents({}, "zero bytes")
        if path.suffix == ".safetensors":
            return read_header(path)
        value = follow(_pickle_of(path))
    except (
        OSError,
        EOFError,
        ValueError,
        zipfile.BadZipFile,
        struct.error,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        zlib.error,
        lzma.LZMAError,
    ) as error:
        return Contents({}, str(error) or type(error).__name__)
    if not isinstance(value, dict):
        return Contents({}, f"a {type(value).__name__}, not a dict of tensors")
    return Contents({str(k): v for k, v in cast("dict[Any, Any]", value).items()})


def read_header(path: Path) -> Contents:
    """The header of a .safetensors; a fault when it is cut off, or the file is shorter or longer than it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(8)
        length = int(struct.unpack("<Q", raw)[0]) if len(raw) == 8 else 0
        if not 0 < length <= min(size - 8, _MAX_HEADER):
            return Contents({}, f"no safetensors header in its {size} bytes")
        try:
            header = json.loads(file.read(length))
            items = {k: v for k, v in header.items() if k != "__metadata__"}
            shapes = {
                k: Shape(_DTYPES.get(v["dtype"], str(v["dtype"])), tuple(map(int, v["shape"])))
                for k, v in items.items()
            }
            end = 8 + length + max((int(v["data_offsets"][1]) for v in items.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
            return Contents({}, "a safetensors header that cannot be parsed")
    fault = (
        "" if end == size else f"{size} bytes where its header says {end}: {'cut off' if size < end else 'too long'}"
    )
    return Contents(shapes, fault, end)


def _pickle_of(path: Path) -> BinaryIO:
    """The pickle in a torch.save file. Of a compressed one only the start is read, since its pickle comes first."""
    if path.suffix == ".gz":
        with gzip.open(path) as file:
            return _after_local_header(io.BytesIO(file.read(1 << 20)))
    with path.open("rb") as start:
        if (head := start.read(4)) != b"PK\x03\x04":
            return _old_form(path, head)
    if not zipfile.is_zipfile(path):
        raise ValueError("an archive without its end: cut off")
    with zipfile.ZipFile(path) as archive:
        name = next((n for n in archive.namelist() if n.endswith("data.pkl")), "")
        if not name or archive.getinfo(name).file_size > _MAX_PICKLE:
            raise ValueError("an archive without a data.pkl of sensible size")
        return io.BytesIO(archive.read(name))


def _old_form(path: Path, head: bytes) -> BinaryIO:
    """The fourth pickle of a file of torch.save from before its archives: magic, protocol and system come first."""
    if head[:1] != b"\x80":
        raise ValueError("no file of torch.save")
    with path.open("rb") as file:
        content = io.BytesIO(file.read(_MAX_PICKLE))
    for _ in range(3):
        follow(content)
    return content


def _after_local_header(file: BinaryIO) -> BinaryIO:
    """Move to the content of a zip's first member (PKWARE APPNOTE 4.3.7: names' lengths at byte 26)."""
    head = file.read(30)
    if head[:4] != b"PK\x03\x04":
        raise ValueError("no archive of torch.save")
    name, extra = struct.unpack("<HH", head[26:30])
    if not file.read(name).endswith(b"data.pkl"):
        raise ValueError("an archive that does not begin with data.pkl")
    file.seek(extra, io.SEEK_CUR)
    return file


class _Mark:
    """The pickle machine's mark."""


def follow(file: BinaryIO) -> Any:
    """The value of a pickle, tensors as Shapes; calls and globals stay what they are named.

    Raises:
        ValueError: an opcode that torch.save does not write for a dict of tensors.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name in ("PROTO", "FRAME"):
            continue
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[cast("int", argument)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[cast("int", argument)])
        else:
            _step(name, argument, stack)
    raise ValueError("a pickle without an end")


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    "INT",
    "LONG",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINBYTES",
    "GLOBAL",
}


def _step(name: str, argument: Any, stack: list[Any]) -> None:
    if name in _LITERALS:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in ("EMPTY_DICT", "EMPTY_LIST", "MARK"):
        stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "MARK": _Mark}[name]())
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(tuple(_take(stack, int(name[-1]))))
    elif name == "TUPLE":
        stack.append(tuple(_to_mark(stack)))
    elif name == "STACK_GLOBAL":
        stack.append(" ".join(map(str, _take(stack, 2))))
    elif name == "BINPERSID":
        stack.append(("storage", stack.pop()))
    elif name == "REDUCE":
        called, arguments = _take(stack, 2)
        stack.append(_call(called, arguments))
    elif name in ("APPEND", "APPENDS"):
        items = _to_mark(stack) if name == "APPENDS" else [stack.pop()]
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _to_mark(stack) if name == "SETITEMS" else _take(stack, 2)
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    elif name == "BUILD":
        stack.pop()
    else:
        raise ValueError(f"a pickle with opcode {name}, which torch.save does not write for a dict of tensors")


def _take(stack: list[Any], count: int) -> list[Any]:
    taken = stack[-count:]
    del stack[-count:]
    return taken


def _to_mark(stack: list[Any]) -> list[Any]:
    at = max(i for i, value in enumerate(stack) if isinstance(value, _Mark))
    taken = stack[at + 1 :]
    del stack[at:]
    return taken


def _call(called: Any, arguments: Any) -> Any:
    """A tensor's Shape, an ordered dict as a dict; any other call as a tuple of what would be called."""
    name = str(called).split()[-1] if called else ""
    if name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_tensor"):
        storage, dims = arguments[0], arguments[2]
        told = next((str(a).split()[-1] for a in arguments if isinstance(a, str) and a.startswith("torch ")), "")
        kind = told or str(storage[1][1]).split()[-1]
        return Shape(_STORAGES.get(kind, kind), tuple(map(int, dims)))
    if name == "OrderedDict":
        return {}
    return ("call", called, arguments)
