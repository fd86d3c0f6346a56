"""Prompts to answer and answers that were kept, both read from disk as they are asked for: what is held of each is its place."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Value = TypeVar("Value")
_FILE_BITS = 12  # of a place, which file it is in; the others are the byte


class Prompts(Mapping[str, tuple[int, ...]]):
    """Token ids by prompt id, in a file; 28 bytes of memory a prompt. Goes to other processes as it is."""

    def __init__(self, path: Path, prompts: Iterable[tuple[str, npt.NDArray[np.int32]]]) -> None:
        """Write `prompts`, ids by prompt id, to the file `path`; of equal prompt ids the first counts."""
        names, lengths = bytearray(), array("q")
        with path.open("wb") as file:
            for name, ids in prompts:
                file.write(np.ascontiguousarray(ids, np.int32).tobytes())
                names += bytes.fromhex(name)
                lengths.append(len(ids))
        table = np.frombuffer(bytes(names), "S12")
        self._path = path
        self._names, first = np.unique(table, return_index=True)
        starts = np.cumsum([0, *lengths], dtype=np.int64)
        self._starts, self._ends = starts[:-1][first], starts[1:][first]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return (bytes(name).ljust(12, b"\0").hex() for name in self._names)

    def __getitem__(self, name: str) -> tuple[int, ...]:
        wanted = np.frombuffer(bytes.fromhex(name), "S12")[0]
        at = int(np.searchsorted(self._names, wanted))
        if at == len(self._names) or self._names[at] != wanted:
            raise KeyError(name)
        with self._path.open("rb") as file:
            file.seek(4 * int(self._starts[at]))
            return tuple(np.frombuffer(file.read(4 * int(self._ends[at] - self._starts[at])), np.int32).tolist())


class Kept(Mapping[str, Value], Generic[Value]):
    """Values that stand as lines of files, by name; some may be given here instead."""

    def __init__(self, parse: Callable[[bytes], Value]) -> None:
        """`parse`: a line to its value."""
        self._parse = parse
        self._files: list[BinaryIO] = []
        self._places: dict[str, int] = {}
        self._given: dict[str, Value] = {}

    def lines(self, path: Path) -> Iterator[tuple[bytes, Callable[[str], None]]]:
        """The lines of a file, each with what notes it as the value of a name; of two for a name the later one counts."""
        file = path.open("rb")
        number = len(self._files)
        assert number < 1 << _FILE_BITS
        self._files.append(file)
        at = 0
        with path.open("rb") as reading:
            for line in reading:
                place = (at << _FILE_BITS) + number
                yield line, lambda name, place=place: self._places.__setitem__(name, place)
                at += len(line)

    def give(self, name: str, value: Value) -> None:
        self._given[name] = value

    def keep(self, names: Iterable[str]) -> None:
        """Part with all others."""
        wanted = set(names)
        self._places = {name: place for name, place in self._places.items() if name in wanted}

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __getitem__(self, name: str) -> Value:
        if name in self._given:
            return self._given[name]
        place = self._places[name]
        file = self._files[place & ((1 << _FILE_BITS) - 1)]
        file.seek(place >> _FILE_BITS)
        return self._parse(file.readline())

    def __contains__(self, name: object) -> bool:
        return name in self._given or name in self._places

    def __iter__(self) -> Iterator[str]:
        yield from self._places
        yield from [name for name in self._given if name not in self._places]

    def __len__(self) -> int:
        return len(self._places) + sum(name not in self._places for name in self._given)
