"""Which tool wrote a hidden-state store, told from names, config files and one sample's keys; and what files it has.

Of one sample the names are read, of a few more when it is damaged: no tensor is touched and nothing is unpickled.
"""

from __future__ import annotations

import heapq
import importlib
import os
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from stages.bridges import formats
from stages.bridges._names import SampleNames, names_in, read_json
from stages.contracts.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

LastState = Literal["before_final_norm", "after_final_norm", "unknown"]
_DEPTH = 2  # folders below the root that are looked into: rows_{a}-{b}, or source/rows_{a}-{b}
_TRIES = 5
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class StoreKind:
    """A tool's format.

    Attributes:
        tool: speculators, specforge, angelslim, model_optimizer, nemo_automodel or draftline.
        era: "0.3-0.4", ">=0.5" or "any".
        dialect: key of capture.dialects.DIALECTS in which this store's layer ids are written; None: they are not written.
        last_state: where the last state stands.
        pattern: of its files, in words for a person.
        numbering: the tool's own dialect, whether ids are written or not; None where the tool has none of its own.
    """

    tool: str
    era: str
    dialect: str | None
    last_state: LastState
    pattern: str
    numbering: str | None = None


@dataclass(frozen=True)
class StoreFile:
    """One file that holds samples. folder: relative to the root, "" for flat; index: the tool's number or conversation id."""

    folder: str
    name: str
    index: int | str | None
    bytes: int

    @property
    def path(self) -> str:
        """Relative to the store's root."""
        return f"{self.folder}/{self.name}" if self.folder else self.name


@dataclass(frozen=True, eq=False)
class ForeignRow:
    """One sample, unpadded. input_ids i64 [L]; loss_mask u8, as long as it is stored, or None; aux: states [L, H],
    ascending points, dtype as stored; last: [L, H] or None; file: relative to the store's root; padding: tokens left out at its end, which `whole`
    still has; last_state: where the row itself says so. Tensors are views of the mapped file: do not write to them."""

    index: int | str
    file: str
    input_ids: Tensor
    loss_mask: Tensor | None
    aux: tuple[Tensor, ...]
    last: Tensor | None
    padding: int = 0
    last_state: LastState | None = None
    whole: ForeignRow | None = field(default=None, repr=False)

    def first(self, tokens: int) -> ForeignRow:
        """The row with that many tokens: fewer, or more when some of what was taken for padding is none after all."""
        source = self if self.whole is None else self.whole
        assert 0 < tokens <= len(source.input_ids)
        if tokens == len(self.input_ids):
            return self
        return replace(
            source,
            input_ids=source.input_ids[:tokens],
            loss_mask=None if source.loss_mask is None else source.loss_mask[:tokens],
            aux=tuple(a[:tokens] for a in source.aux),
            last=None if source.last is None else source.last[:tokens],
            padding=len(source.input_ids) - tokens,
            whole=source,
        )


@dataclass(frozen=True)
class Look:
    """What recognition may know of a store: its folders, its config, and the names in one sample.

    Attributes:
        sample: a file that some format's names fit.
        config: of data_config.json beside the sample or in any of the folders; None if none can be read.
        by_name: only the sample's name counts, for no sample could be read.
    """

    root: Path
    sample: Path | None
    config: dict[str, Any] | None = field(hash=False)
    by_name: bool = False

    @cached_property
    def names(self) -> SampleNames:
        """Keys and globals of the sample; empty when it cannot be read, or is not to be."""
        return names_in(self.sample) if self.sample and not self.by_name else SampleNames()

    @property
    def nested(self) -> bool:
        """Whether the sample stands in a folder below the root."""
        return self.sample is not None and self.sample.parent != self.root

    @property
    def suffix(self) -> str:
        return self.sample.suffix if self.sample else ""

    def fits(self, pattern: re.Pattern[str]) -> bool:
        """Whether there is a sample whose name `pattern` fits."""
        return self.sample is not None and pattern.fullmatch(self.sample.name) is not None


class Format(Protocol):
    """A module of stages/bridges/formats.

    SAMPLE fits the name of a file of samples, its group `index` the tool's number or conversation id; SIDE_FILES are
    names of files that belong to the store and hold no sample; CONFIG is the file that describes a run, "" for none.
    """

    SAMPLE: re.Pattern[str]
    CONFIG: str
    SIDE_FILES: frozenset[str]

    def recognise(self, look: Look) -> StoreKind | None: ...

    def read(self, sample: dict[str, Any], file: StoreFile, path: Path) -> Iterator[ForeignRow]:
        """Rows of the opened file at `path`.

        Raises:
            DataError: it is not a whole sample of this format.
        """
        ...

    def layer_ids(self, config: dict[str, Any]) -> list[int] | None:
        """Layer ids as `config` (CONFIG_NAME, in a folder of samples) writes them; None where it does not."""
        ...


@cache
def all_formats() -> dict[str, Format]:
    """Every module of stages/bridges/formats by name; those with more to go by come first in `recognise`."""
    modules = (m.name for m in pkgutil.iter_modules(formats.__path__) if not m.name.startswith("_"))
    return {name: importlib.import_module(f"{formats.__name__}.{name}") for name in modules}  # type: ignore[misc]


def format_of(kind: StoreKind) -> Format:
    """The module that reads `kind`."""
    legacy = kind.tool == "speculators" and kind.era == "0.3-0.4"
    return all_formats()["speculators_legacy" if legacy else kind.tool]


def folders_below(root: Path) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Folders that may hold samples, numbers in their names read as numbers: ("", entries) first. Entries are files."""
    waiting: list[tuple[str, Path]] = [("", root)]
    while waiting:
        name, path = waiting.pop()
        files, below = [], []
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
                else:
                    files.append(entry)
        yield name, files
        if name.count("/") + bool(name) < _DEPTH:
            below = sorted((b for b in below if not b.startswith(".")), key=natural, reverse=True)
            waiting += [(f"{name}/{b}" if name else b, path / b) for b in below]


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sorting key under which rows_2000-4000 comes before rows_10000-12000."""
    return tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in _DIGITS.split(name) if p)


def recognise(root: Path) -> StoreKind | None:
    """The kind of store below `root`, or None. Should the first sample be damaged, the names in a few more are read.

    Raises:
        DataError: no such folder.
    """
    for look in _looks(_folder(root)):
        for module in all_formats().values():
            if (kind := module.recognise(look)) is not None:
                return kind
    return None


def _folder(root: Path) -> Path:
    if not root.is_dir():
        raise DataError(
            "There is no store here",
            where=str(root),
            expected="a folder that a tool put hidden states in",
            got="a file" if root.exists() else "no such path",
            do="name the folder that holds rows_{a}-{b}, data_{i}.pt or the like",
        )
    return root


def _looks(root: Path) -> Iterator[Look]:
    """A look through each of the first samples whose names can be read; at last one that goes by file names alone."""
    samples, config = _first_samples(root)
    looks = [Look(root, sample, config) for sample in samples]
    yield from (look for look in looks if not look.names.fault)
    yield Look(root, samples[0] if samples else None, config, by_name=True)


def _first_samples(root: Path) -> tuple[list[Path], dict[str, Any] | None]:
    """Up to _TRIES files of the first folder that holds samples, empty ones last; and the first config that can be read."""
    patterns = [module.SAMPLE for module in all_formats().values()]
    beside = frozenset[str]().union(*(module.SIDE_FILES for module in all_formats().values()))
    config: dict[str, Any] | None = None
    samples: list[Path] = []
    for name, files in folders_below(root):
        config = config or read_json(root / name / "data_config.json")
        if not samples:
            fitting = (f for f in files if f.name not in beside and any(p.fullmatch(f.name) for p in patterns))
            first = heapq.nsmallest(_TRIES, fitting, key=lambda f: (len(f.name), f.name))
            samples = [Path(f.path) for f in sorted(first, key=lambda f: _bytes(f) == 0)]
        if samples and config:
            break
    return samples, config


def list_files(root: Path, kind: StoreKind) -> tuple[list[StoreFile], list[Path]]:
    """Files of samples, folders and indices in numeric order, and files that are neither samples nor belong to the store.

    Raises:
        DataError: no such folder.
    """
    module = format_of(kind)
    found, strange = [], []
    for folder, files in folders_below(_folder(root)):
        inside: list[StoreFile] = []
        for file in files:
            match = module.SAMPLE.fullmatch(file.name)
            if match and file.name not in module.SIDE_FILES:
                index = match["index"]
                number = int(index) if index.isascii() and index.isdigit() else index
                inside.append(StoreFile(folder, file.name, number, _bytes(file)))
            elif file.name not in module.SIDE_FILES:
                strange.append(Path(file.path))
        inside.sort(key=lambda f: (_order(f.index), f.name))
        found += inside
    return found, sorted(strange)


def _order(index: int | str | None) -> tuple[tuple[int, int, str], ...]:
    """`natural` of an index, without the search in its digits where it is a number: there are many."""
    return ((0, index, ""),) if isinstance(index, int) else natural(str(index))


def _bytes(file: os.DirEntry[str]) -> int:
    """Size; 0 for a link that leads nowhere."""
    try:
        return file.stat().st_size
    except OSError:  # or in a circle
        return 0
