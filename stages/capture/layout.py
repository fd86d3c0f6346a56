"""Where everything lies in rows.safetensors: its header, and the slices of each row and each group of rows.

T tokens of R rows laid end to end, S slots, H hidden size; the header is followed by the tensors in this order:

    default:       offsets i64 [R+1] | states bf16 [T, S, H] | input_ids i32 [T] | loss_mask u8 [T]
    smaller forms: offsets, aux_offsets, last_offsets i64 [R+1] | scales f32 [A, S-1] (float8 only) | input_ids i32 [T]
                   | last bf16 [E, H] | aux bf16 or float8_e4m3 [A, S-1, H] | loss_mask u8 [T]

A and E of the T tokens keep their auxiliary and last states (stages/capture/forms.py). All counts follow from the rows
alone, so they are known before the first state is. Header and offsets are the head; behind it a row is one slice of each
tensor. Nothing is padded: 2·S·H + 5 bytes a token in the default form.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from stages.capture.forms import kept
from stages.capture.rows import Row
from stages.contracts.manifest import CaptureSpec, FolderConfig, RowGroup, StoredForm

ROWS = "rows.safetensors"
CONFIG = "data_config.json"
_ALIGN = 64
_MAX_HEADER = 1 << 20
_WIDTH = {"I64": 8, "F32": 4, "BF16": 2, "I32": 4, "U8": 1, "F8_E4M3": 1}
KIND = {
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
Counted = Literal["offsets", "aux_offsets", "last_offsets"]
Offsets = dict[Counted, npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Stream:
    """A tensor that is cut by rows. `by` names the offsets that cut it."""

    name: str
    kind: str
    by: Counted
    tail: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Bytes an entry."""
        return _WIDTH[self.kind] * int(np.prod(self.tail, dtype=np.int64))


def streams(capture: CaptureSpec) -> tuple[Stream, ...]:
    """Tensors behind the offsets, in file order."""
    aux, H, form = len(capture.points), capture.hidden_size, capture.form
    ids, mask = Stream("input_ids", "I32", "offsets"), Stream("loss_mask", "U8", "offsets")
    if form == StoredForm():
        return (Stream("states", "BF16", "offsets", (aux + 1, H)), ids, mask)
    small = form.aux_dtype == "float8_e4m3"
    scales = (Stream("scales", "F32", "aux_offsets", (aux,)),) if small else ()
    states = Stream("aux", "F8_E4M3" if small else "BF16", "aux_offsets", (aux, H))
    return (*scales, ids, Stream("last", "BF16", "last_offsets", (H,)), states, mask)


def counted_by(form: StoredForm) -> tuple[Counted, ...]:
    """The offsets that a folder of this form has."""
    return ("offsets",) if form == StoredForm() else ("offsets", "aux_offsets", "last_offsets")


def offsets_of(rows: Sequence[Row], form: StoredForm) -> Offsets:
    """i64 [R+1] each, from the rows alone."""
    sums = [[0, 0, 0]]
    for row in rows:
        aux, last = kept(row.loss_mask, form)
        sums.append([len(row), int(aux.sum()), int(last.sum())])
    running = np.cumsum(np.array(sums, dtype="<i8"), axis=0)
    every: Offsets = {"offsets": running[:, 0], "aux_offsets": running[:, 1], "last_offsets": running[:, 2]}
    return {name: every[name] for name in counted_by(form)}


def header(capture: CaptureSpec, rows: int, totals: dict[Counted, int]) -> dict[str, dict[str, Any]]:
    """The safetensors header, tensors in file order. totals: the last entry of each offsets."""
    shapes: list[tuple[str, str, list[int]]] = [(name, "I64", [rows + 1]) for name in counted_by(capture.form)]
    shapes += [(s.name, s.kind, [totals[s.by], *s.tail]) for s in streams(capture)]
    told: dict[str, dict[str, Any]] = {}
    begin = 0
    for name, kind, shape in shapes:
        end = begin + _WIDTH[kind] * int(np.prod(shape, dtype=np.int64))
        told[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    return told


def head_bytes(capture: CaptureSpec, offsets: Offsets) -> bytes:
    """Everything before the first row's bytes."""
    rows = len(offsets["offsets"]) - 1
    told = header(capture, rows, {name: int(o[-1]) for name, o in offsets.items()})
    return _framed(told) + b"".join(offsets[name].astype("<i8").tobytes() for name in counted_by(capture.form))


def _framed(told: dict[str, dict[str, Any]]) -> bytes:
    text = json.dumps(told, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % _ALIGN
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding


def read_header(file: Path) -> tuple[dict[str, Any] | None, int]:
    """The header as it lies in the file and where the data behind it begins; no header where there is none."""
    with file.open("rb") as handle:
        raw = handle.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1
        if not 0 < length <= _MAX_HEADER or (8 + length) % _ALIGN:
            return None, 8 + length
        text = handle.read(length)
    try:
        told = json.loads(text)
    except ValueError:  # bytes that are no UTF-8, or no JSON
        told = None
    return (told if isinstance(told, dict) else None), 8 + length


def totals_of(config: FolderConfig) -> dict[Counted, int]:
    """Entries of each offsets' tensors, by the groups."""
    every: dict[Counted, int] = {
        "offsets": config.tokens,
        "aux_offsets": sum(g.aux_tokens for g in config.groups),
        "last_offsets": sum(g.last_tokens for g in config.groups),
    }
    return {name: every[name] for name in counted_by(config.capture.form)}


def header_of(config: FolderConfig) -> tuple[dict[str, dict[str, Any]], int]:
    """The header that a folder of this config must have, and where the data behind it begins."""
    told = header(config.capture, len(config.row_ids), totals_of(config))
    return told, len(_framed(told))


def folder_bytes(capture: CaptureSpec, rows: Sequence[Row]) -> int:
    """Size of rows.safetensors, to the byte, before it is written."""
    offsets = offsets_of(rows, capture.form)
    return len(head_bytes(capture, offsets)) + sum(s.width * int(offsets[s.by][-1]) for s in streams(capture))


def starts(capture: CaptureSpec, head: int, totals: dict[Counted, int]) -> dict[str, int]:
    """The byte at which each stream begins, behind a head of `head` bytes."""
    found: dict[str, int] = {}
    for stream in streams(capture):
        found[stream.name] = head
        head += stream.width * totals[stream.by]
    return found


def head_size(config: FolderConfig) -> int:
    return header_of(config)[1] + 8 * (len(config.row_ids) + 1) * len(counted_by(config.capture.form))


def group_slices(config: FolderConfig) -> Iterator[tuple[RowGroup, list[tuple[int, int]]]]:
    """Each group with the bytes of the file that are its own: (begin, end) in file order."""
    at = starts(config.capture, head_size(config), totals_of(config))
    for group in config.groups:
        counts = {"offsets": group.tokens, "aux_offsets": group.aux_tokens, "last_offsets": group.last_tokens}
        slices: list[tuple[int, int]] = []
        for stream in streams(config.capture):
            begin = at[stream.name]
            at[stream.name] = begin + stream.width * counts[stream.by]
            slices.append((begin, at[stream.name]))
        yield group, slices


def group_counts(offsets: Offsets, start: int, end: int) -> tuple[int, int, int]:
    """Tokens of rows start..end, and how many of them keep auxiliary and last states."""
    tokens = int(offsets["offsets"][end] - offsets["offsets"][start])
    small = [offsets[name] for name in ("aux_offsets", "last_offsets") if name in offsets]
    aux, last = (int(o[end] - o[start]) for o in small) if small else (tokens, tokens)
    return tokens, aux, last


def covers(groups: Iterable[RowGroup], offsets: Offsets) -> bool:
    """Whether the groups follow one another over all rows and count their tokens as the offsets do."""
    at = 0
    for group in groups:
        if group.start != at or not at < group.end < len(offsets["offsets"]):
            return False
        at = group.end
        if group_counts(offsets, group.start, at) != (group.tokens, group.aux_tokens, group.last_tokens):
            return False
    return at == len(offsets["offsets"]) - 1
