"""A foreign store, opened: its kind, its files in numeric order, what its configs say, and its rows one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.bridges._names import read_json
from stages.bridges._open import demand_crc, sample
from stages.bridges._rows import demand_even
from stages.bridges.kinds import ForeignRow, Format, StoreFile, StoreKind, format_of, list_files, recognise
from stages.contracts.errors import DataError

_SHOWN = 5


@dataclass(frozen=True)
class ForeignStore:
    """Attributes: files: in numeric order; strange: files that are no samples; configs: by folder, those that can be read.
    Nothing is opened before it is asked for."""

    root: Path
    kind: StoreKind
    files: tuple[StoreFile, ...]
    strange: tuple[Path, ...]
    configs: dict[str, dict[str, Any]]

    @property
    def _format(self) -> Format:
        return format_of(self.kind)

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        """As the store's configs write them, in the dialect `kind.dialect`; None where no config does.

        Raises:
            DataError: two folders say two things.
        """
        told = {f: tuple(ids) for f, c in self.configs.items() if (ids := self._format.layer_ids(c)) is not None}
        if len(set(told.values())) > 1:
            apart = {ids: folder for folder, ids in told.items()}
            raise DataError(
                "Folders of this store were captured at different layers",
                where=str(self.root),
                expected="the same layer_ids in every config",
                got="; ".join(f"{folder or '.'}: {list(ids)}" for ids, folder in apart.items()),
                do="adopt them one by one from folders of their own, or extract one of them again",
            )
        return next(iter(told.values()), None)

    @property
    def without_config(self) -> tuple[str, ...]:
        """Folders that hold samples and no config that says their layers: what a crashed run leaves."""
        told = {f for f, c in self.configs.items() if self._format.layer_ids(c) is not None}
        if "" in told:  # one for the whole store
            return ()
        return tuple(dict.fromkeys(f.folder for f in self.files if f.folder not in told))

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of the tool that the configs name."""
        return tuple(sorted({str(v) for c in self.configs.values() if (v := c.get("speculators_version"))}))

    @property
    def hidden_size(self) -> int | None:
        """Of a config, or of the first row that can be read; None where there is none.

        Raises:
            DataError: two configs say two things.
        """
        models = [m for c in self.configs.values() if isinstance(m := c.get("model"), dict)]
        told = {size for m in models if type(size := m.get("hidden_size")) is int}
        if len(told) > 1:
            raise DataError(
                "Folders of this store are of different models",
                where=str(self.root),
                expected="one hidden_size",
                got=str(sorted(told)),
                do="keep each model's states in a store of its own",
            )
        return int(told.pop()) if told else self._width()

    def _width(self) -> int | None:
        for file in self.files:
            try:
                return next(int(row.aux[0].shape[-1]) for row in self.rows_of(file))
            except (DataError, StopIteration):
                continue
        return None

    def rows(self) -> Iterator[ForeignRow]:
        """Every row, unpadded, files in numeric order.

        Raises:
            DataError: at the first file that is damaged or no sample.
        """
        for file in self.files:
            yield from self.rows_of(file)

    def rows_of(self, file: StoreFile, *, check_bytes: bool = False, uneven: bool = False) -> Iterator[ForeignRow]:
        """Rows of one file: one, or a shard's.

        Args:
            check_bytes: read the whole file first, and compare the check sums that it was written with, if it has any.
            uneven: give rows with more or fewer states than tokens too, for value checks to say what is missing.

        Raises:
            DataError: see stages/bridges/_open.py and the format's `read`.
        """
        path = self.root / file.path
        with sample(path) as opened:
            if check_bytes:
                demand_crc(path)
            for row in self._format.read(opened, file, path):
                if not uneven:
                    demand_even(row, path)
                yield row

    def row(self, file: StoreFile) -> ForeignRow:
        """The first row of `file`; of every format but shards the only one. Raises DataError as `rows_of` does."""
        return next(iter(self.rows_of(file)))


def open_store(root: Path) -> ForeignStore:
    """Open the store of another tool at `root`. Reads names and configs, and at most one sample to name the kind.

    Raises:
        DataError: no store that is known here, or one without a single sample.
    """
    kind = recognise(root)
    if kind is None:
        raise DataError(
            "This is no store of hidden states that is known here",
            where=str(root),
            expected="speculators, SpecForge, AngelSlim, Model-Optimizer or NeMo Automodel, by names and keys",
            got=_some_names(root),
            do="name the folder that holds rows_{a}-{b}, data_{i}.pt, hs_{i}.safetensors or the like",
        )
    files, strange = list_files(root, kind)
    if not files:
        raise DataError(
            "The store holds no sample",
            where=str(root),
            expected=kind.pattern,
            got=_some_names(root),
            do="look whether the run that should have written it ever wrote a row",
        )
    name = format_of(kind).CONFIG
    folders = dict.fromkeys(["", *(f.folder for f in files)]) if name else {}
    found = {f: read_json(root / f / name) for f in folders}
    store = ForeignStore(root, kind, tuple(files), tuple(strange), {f: c for f, c in found.items() if c is not None})
    return _with_norm(store)


def _with_norm(store: ForeignStore) -> ForeignStore:
    """Let the first row that says so tell where last states stand, for a format whose tool stores either."""
    if store.kind.last_state != "unknown":
        return store
    for file in store.files[:_SHOWN]:
        try:
            row = store.row(file)
        except (DataError, StopIteration):
            continue
        if row.last_state is not None:
            return replace(store, kind=replace(store.kind, last_state=row.last_state))
        break
    return store


def _some_names(root: Path) -> str:
    names = sorted(p.name for p in root.iterdir())
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "") or "nothing"
