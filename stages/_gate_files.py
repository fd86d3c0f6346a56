"""Files that a gate reads: the ones their manifests speak of, or named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.contracts.errors import DataError
from stages.contracts.files import file_digest
from stages.contracts.manifest import MERGED, PREPARED, PreparedManifest, renewal
from stages.gates._judge import Table

if TYPE_CHECKING:
    from pandas import DataFrame

_FRAME_ROWS = 1024
Gathered = tuple[str, str, list[Table]]  # subject, its digest, tables


def damaged(path: Path, expected: str, got: str) -> DataError:
    stage = "merge" if path.is_relative_to(MERGED) else "prepare"
    return DataError(
        "A file is not the one that its manifest speaks of, and cannot be judged",
        where=str(path),
        expected=expected,
        got=got,
        do=renewal(path, stage),
    )


def demand_bytes(path: Path, expected: str) -> None:
    """Raises DataError when a file is missing or not the one that its manifest digests."""
    if (got := file_digest(path)) != expected:
        raise damaged(path, expected, got)


class PreparedFrames:
    """Rows of all sources as frames of a thousand, one below the other, read anew each time. A file that is missing is the
    files table's business, and so is one that was changed and can be read.

    Raises:
        DataError: a changed file that cannot be read, or no file at all.
    """

    def __init__(self, manifest: PreparedManifest) -> None:
        paths = [(PREPARED / s.name / "rows.parquet", s.rows_digest) for s in manifest.sources]
        self._files = [(path, digest) for path, digest in paths if path.exists()]
        if not self._files:
            raise DataError("There are no prepared rows", where=str(PREPARED), do="run `dvc repro prepare`")

    def read(self, columns: Sequence[str] | None = None) -> Iterator[DataFrame]:
        for path, digest in self._files:
            yield from _frames(path, digest, columns)


def _frames(path: Path, digest: str, columns: Sequence[str] | None) -> Iterator[DataFrame]:
    import pyarrow.parquet as pq
    from pyarrow.lib import ArrowException

    try:
        with pq.ParquetFile(path) as file:
            wanted = None if columns is None else list(columns)
            batches = file.iter_batches(_FRAME_ROWS, columns=wanted, use_threads=False)
            while (batch := next(batches, None)) is not None:
                frame = batch.to_pandas()
                yield frame
    except (ArrowException, OSError, TypeError, ValueError) as error:
        raise damaged(path, digest, f"{file_digest(path)}: {error}"[:400]) from error


def prepared_rows(manifest: PreparedManifest) -> DataFrame:
    """Rows of all sources, one below the other. A file that is missing is the files table's business, and so is one that
    was changed and can be read.

    Raises:
        DataError: a changed file that cannot be read, or no file at all.
    """
    import pandas as pd
    from pyarrow.lib import ArrowException

    frames: list[DataFrame] = []
    for source in manifest.sources:
        path = PREPARED / source.name / "rows.parquet"
        if not path.exists():
            continue
        try:
            frames.append(pd.read_parquet(path))
        except (ArrowException, OSError, TypeError, ValueError) as error:
            raise damaged(path, source.rows_digest, f"{file_digest(path)}: {error}"[:400]) from error
    if not frames:
        raise DataError("There are no prepared rows", where=str(PREPARED), do="run `dvc repro prepare`")
    return pd.concat(frames, ignore_index=True)
