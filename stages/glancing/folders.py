"""A store's folders, accounted for from the listing alone: rows, holes, doubles, and files whose size cannot be right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, Protocol

from stages.glancing.contents import Contents, Shape
from stages.glancing.runs import Run
from stages.glancing.spans import Span, size_of, spans_of

_RANGE = re.compile(r"rows_(\d+)-(\d+)")
_WIDTHS = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bool": 1, "uint8": 1}
_BAND = 1024  # bytes by which the frame of an archive varies with the lengths of its names


class File(Protocol):
    """One file of samples, as bridges list it."""

    @property
    def folder(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def index(self) -> int | str | None: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True)
class Frame:
    """What a file of L tokens weighs, from one sample: about `fixed + L * per_token` bytes."""

    fixed: int
    per_token: int

    def tokens(self, size: int) -> int:
        return max(0, round((size - self.fixed) / self.per_token))

    def fits(self, size: int) -> bool:
        """Whether a whole number of tokens gives `size`; True where that could not be told."""
        if self.per_token < 4 * _BAND:
            return True
        return size > self.fixed - _BAND and abs(size - self.fixed - self.tokens(size) * self.per_token) <= _BAND


def frame_of(contents: Contents, size: int, tokens: int) -> Frame | None:
    """The frame of a sample of `tokens` tokens in `size` bytes; None for one that tells no tokens or is compressed."""
    data = sum(_bytes(v) for v in contents.tensors.values())
    if not tokens or not data or data > size:
        return None
    return Frame(size - data, data // tokens)


def _bytes(value: Any) -> int:
    """Of a tensor, or of a list of them: no tool nests them deeper."""
    if isinstance(value, Shape):
        return prod(value.dims) * _WIDTHS.get(value.dtype, 1 if "float8" in value.dtype else 2)
    return sum(_bytes(v) for v in value if isinstance(v, Shape)) if isinstance(value, list) else 0


@dataclass
class Folder:
    """One folder of a store.

    Attributes:
        span: the rows its name claims, end exclusive; None for a name without a range.
        held: rows it has, counted over all folders.
        holes: its own numbers that are not there though a later one is.
        short: rows missing after the last one.
        doubled: pairs of files with one number.
        outside: numbers that its range does not hold.
        empty, small, odd: files of zero bytes, smaller than their length, of a size that fits no whole number of tokens.
        tokens: None where nothing says; estimated: whether they are from file sizes.
    """

    name: str
    span: Span | None
    run: Run | None
    has_lengths: bool
    files: int = 0
    bytes: int = 0
    tokens: int | None = None
    estimated: bool = False
    over_all: bool = False
    held: list[Span] = field(default_factory=list)
    holes: list[Span] = field(default_factory=list)
    short: int = 0
    first: int = 0
    doubled: list[str] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    small: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    without_length: int = 0
    without_file: int = 0

    @property
    def rows(self) -> int:
        return size_of(self.held)

    @property
    def told(self) -> str:
        """The file that says how many rows there should be, or nothing."""
        if self.run is None or self.run.rows is None:
            return ""
        return "manifest.json" if self.run.tool == "nemo_automodel" else "data_config.json"

    @property
    def missing(self) -> int:
        return size_of(self.holes) + self.short

    @property
    def state(self) -> str:
        """In a few words, for a table."""
        said = [f"{size_of(self.holes)} holes" if self.holes else "", f"{self.short} short" if self.short else ""]
        said += [f"{len(self.doubled)} doubled" if self.doubled else ""]
        said += [f"{len(self.outside)} outside its range" if self.outside else ""]
        damaged = len(self.empty) + len(self.small)
        said += [f"{damaged} damaged" if damaged else "", f"{len(self.odd)} of odd size" if self.odd else ""]
        return ", ".join(s for s in said if s) or "whole"


def range_of(name: str) -> Span | None:
    """The rows that a folder's name claims: rows_0-2000 is [0, 2000)."""
    found = _RANGE.fullmatch(name.rsplit("/", 1)[-1])
    return (int(found[1]), int(found[2])) if found else None


def account(
    name: str,
    span: Span | None,
    files: Sequence[File],
    run: Run | None,
    lengths: Mapping[str, int] | None,
    frame: Frame | None,
) -> Folder:
    """Account for one folder. frame: of a sample of the store, or None."""
    folder = Folder(name, span, run, lengths is not None, files=len(files))
    folder.bytes = sum(f.bytes for f in files)
    _number(folder, files)
    _weigh(folder, files, lengths, frame)
    return folder


def _number(folder: Folder, files: Sequence[File]) -> None:
    """Rows, holes, doubles: by number where files have numbers, else a row a file."""
    seen: dict[int, str] = {}
    for file in files:
        if type(file.index) is not int:
            continue
        if file.index in seen:
            folder.doubled.append(f"{seen[file.index]} and {file.name}")
        seen.setdefault(file.index, file.name)
    if not seen:
        folder.held = [(0, len({f.index for f in files}))] if files else []
        return
    here = spans_of(seen)
    folder.first = here[0][0]
    start, end = folder.span or (0, 0)
    folder.over_all = start > 0 and folder.first >= start
    base = start if folder.over_all else 0
    told = folder.run.rows if folder.run else None
    if folder.span:
        folder.outside = sorted(i for i in seen if not base <= i < base + end - start)
        count = end - start if told is None else min(told, end - start)
    else:
        base = folder.first if told is None else 0
        count = here[-1][1] - base if told is None else max(told, here[-1][1])
    edges = [(base, base), *(s for s in here if s[0] < base + count), (base + count, base + count)]
    gaps = [(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]]
    folder.short = sum(b - a for a, b in gaps if b >= base + count)
    folder.holes = [g for g in gaps if g[1] < base + count]
    shift = start - base
    folder.held = [(a + shift, b + shift) for a, b in here]


def _weigh(folder: Folder, files: Sequence[File], lengths: Mapping[str, int] | None, frame: Frame | None) -> None:
    """Tokens, and sizes that cannot be right."""
    tokens = 0
    known = set[str]()
    for file in files:
        key = str(file.index)
        length = lengths.get(key) if lengths else None
        if length is not None:
            known.add(key)
            tokens += length
        if file.bytes == 0:
            folder.empty.append(file.name)
        elif (
            frame
            and length is not None
            and file.bytes < max(length * frame.per_token, frame.fixed + length * frame.per_token - _BAND)
        ):
            folder.small.append(file.name)
        elif frame and not frame.fits(file.bytes):
            folder.odd.append(file.name)
    if lengths is not None:
        folder.tokens = tokens
        folder.without_length = len({str(f.index) for f in files} - known)
        folder.without_file = len(lengths.keys() - known)
    elif frame:
        folder.tokens, folder.estimated = sum(frame.tokens(f.bytes) for f in files), True
