"""A row folder's bytes against its config, read without the code that wrote them: an auditor that shared the writer's
arithmetic would share its faults. What is expected of the file is said in stages/contracts/manifest.py: FolderConfig.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, BinaryIO

from stages.contracts.manifest import FolderConfig, RowGroup

_HEADER_MOST = 1 << 24
_PIECE = 1 << 22
_COUNTED = {"scales": "aux_offsets", "aux": "aux_offsets", "last": "last_offsets"}


def row_faults(file: BinaryIO, config: FolderConfig) -> list[str]:
    """What of rows.safetensors is not as its config says, in words; nothing when every byte is accounted for."""
    try:
        header, begin = _header(file)
        offsets = {n: _numbers(file, header[n], begin, "q") for n in header if n.endswith("offsets")}
        slices = [(n, header[n]["data_offsets"], len(header[n]["shape"])) for n in header if n not in offsets]
        head = begin + max(header[n]["data_offsets"][1] for n in offsets)
        faults = [] if _sha(file, [(0, head)]) == config.head_digest else ["the header and the offsets"]
        if faults:
            return faults  # the places below are read from it
        found: list[str] = []
        for group in config.groups:
            cut = [_slice(begin, span, offsets[_COUNTED.get(n, "offsets")], group) for n, span, _ in slices]
            if _sha(file, cut) != group.bytes_digest:
                found.append(f"rows {config.start + group.start} to {config.start + group.end - 1}")
        end = begin + max(span[1] for _, span, _ in slices)
        file.seek(0, 2)
        if file.tell() != end:
            found.append(f"{file.tell()} bytes instead of {end}")
        return found or _misnamed(file, header, begin, offsets["offsets"], config)
    except (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError, struct.error) as error:
        return [f"the header: {error}"]


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    file.seek(0)
    size = struct.unpack("<Q", file.read(8))[0]
    if size > _HEADER_MOST:
        raise ValueError(f"{size} bytes of header")
    told: dict[str, Any] = json.loads(file.read(size))
    told.pop("__metadata__", None)
    order = sorted(told, key=lambda n: told[n]["data_offsets"][0])
    return {n: told[n] for n in order}, 8 + size


def _numbers(file: BinaryIO, tensor: dict[str, Any], begin: int, kind: str) -> list[int]:
    first, end = tensor["data_offsets"]
    file.seek(begin + first)
    data = file.read(end - first)
    return list(struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data))


def _slice(begin: int, span: list[int], offsets: list[int], group: RowGroup) -> tuple[int, int]:
    """The bytes of a tensor that are the group's."""
    entries = offsets[-1]
    width = (span[1] - span[0]) // entries if entries else 0
    return begin + span[0] + width * offsets[group.start], begin + span[0] + width * offsets[group.end]


def _sha(file: BinaryIO, cuts: list[tuple[int, int]]) -> str:
    sha = hashlib.sha256()
    for first, end in cuts:
        file.seek(first)
        for piece in _pieces(file, end - first):
            sha.update(piece)
    return "sha256:" + sha.hexdigest()


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := file.read(min(size, _PIECE))):
        size -= len(piece)
        yield piece


def _misnamed(
    file: BinaryIO, header: dict[str, Any], begin: int, offsets: list[int], config: FolderConfig
) -> list[str]:
    """Rows whose name is not that of their tokens and mask: a row's id is the head of sha256 over both."""
    ids, mask = (header[n]["data_offsets"] for n in ("input_ids", "loss_mask"))
    faults: list[str] = []
    for name, (first, end) in zip(config.row_ids, pairwise(offsets), strict=True):
        cuts = [
            (begin + ids[0] + 4 * first, begin + ids[0] + 4 * end),
            (begin + mask[0] + first, begin + mask[0] + end),
        ]
        told = _sha(file, cuts).removeprefix("sha256:")
        if not told.startswith(name):
            faults.append(f"row {name}, whose tokens and mask are those of {told[: len(name)]}")
    return faults
