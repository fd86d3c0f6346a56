"""Prepared rows as capture sees them, and how they fall into folders."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stages.contracts.errors import DataError
from stages.contracts.files import file_digest
from stages.contracts.manifest import PREPARED, PreparedManifest, renewal

_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Row:
    """One prepared row. input_ids i32 [L], loss_mask u8 [L] with 1 on assistant tokens."""

    row_id: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class FolderPlan:
    """Rows start..end (end exclusive, counted over all sources) that go into one folder; never of two sources."""

    source: str
    start: int
    rows: tuple[Row, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    @property
    def name(self) -> str:
        return f"rows_{self.start}-{self.end}"

    @property
    def row_ids(self) -> tuple[str, ...]:
        return tuple(row.row_id for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.rows)


def row_id(input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8]) -> str:
    """A row's name is its content: the first 24 hex digits of sha256 over int32 ids, then mask bytes."""
    return hashlib.sha256(input_ids.astype("<i4").tobytes() + loss_mask.astype("u1").tobytes()).hexdigest()[:24]


def read_rows(manifest: PreparedManifest, prepared: Path = PREPARED) -> dict[str, list[Row]]:
    """Rows of every source, sources in the manifest's order, rows in the file's.

    Raises:
        DataError: a file that is not the one the manifest digested, a row whose name is not its content, a row without
            tokens, or rows that occur twice; each is named.
    """
    rows = {source.name: _read_source(prepared, source.name, source.rows_digest) for source in manifest.sources}
    times = Counter(row.row_id for source in rows.values() for row in source)
    doubled = [name for name, n in times.items() if n > 1]
    if doubled:
        raise DataError(
            f"{len(doubled)} prepared rows occur more than once",
            where=str(prepared),
            expected="every row once, so that states and rows can be joined by row_id",
            got=", ".join(doubled[:_SHOWN]) + (" …" if len(doubled) > _SHOWN else ""),
            do="run `dvc repro prepare`; if that does not help, take the duplicates out of the source",
        )
    return rows


def _read_source(prepared: Path, source: str, rows_digest: str) -> list[Row]:
    import pyarrow.parquet as pq

    path = prepared / source / "rows.parquet"
    if (got := file_digest(path)) != rows_digest:
        raise DataError(
            "Prepared rows are not those the manifest speaks of",
            where=str(path),
            expected=rows_digest,
            got=got,
            do=renewal(path, "prepare"),
        )
    table = pq.read_table(path, columns=["row_id", "input_ids", "loss_mask"])
    rows = []
    for name, ids, mask in zip(*(table[c] for c in table.column_names), strict=True):
        row = Row(name.as_py(), ids.values.to_numpy().astype(np.int32), mask.values.to_numpy().astype(np.uint8))
        if not len(row) or row.row_id != row_id(row.input_ids, row.loss_mask):
            raise DataError(
                "A prepared row's name is not its content",
                where=f"{path}: row {row.row_id}",
                expected="a row_id made of sha256 over its ids and mask, and at least one token",
                got=f"{len(row)} tokens, content {row_id(row.input_ids, row.loss_mask)}",
                do=renewal(path, "prepare"),
            )
        rows.append(row)
    return rows


def plan_folders(rows: dict[str, list[Row]], rows_per_folder: int) -> Iterator[FolderPlan]:
    """Cut rows into folders of `rows_per_folder`, anew at the start of every source.

    Counting from each source's own start keeps a folder's content the same when another source grows.
    """
    base = 0
    for source, members in rows.items():
        for start in range(0, len(members), rows_per_folder):
            yield FolderPlan(source, base + start, tuple(members[start : start + rows_per_folder]))
        base += len(members)
