"""Files that a gate reads: the ones their manifests speak of, or named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stages.contracts.errors import DataError
from stages.contracts.files import file_digest
from stages.contracts.manifest import MERGED, PREPARED, PreparedManifest, renewal
from stages.gates._judge import Table

if TYPE_CHECKING:
    from pandas import DataFrame

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
