"""What a check of stored bytes found: which file, which rows, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.contracts.errors import DataError


@dataclass(frozen=True)
class Damage:
    """One damaged place.

    Args:
        file: relative to the root that was checked.
        what: one sentence.
        expected, got: digests, sizes or values.
        do: the command that mends it.
        folder: the row folder it is in, if any.
        rows: first and last row + 1, counted as in the folder's name; None where no row's bytes are hurt (a header, a
            config, a manifest).
        row_ids: the names of those rows.
    """

    file: str
    what: str
    expected: str
    got: str
    do: str
    folder: str = ""
    rows: tuple[int, int] | None = None
    row_ids: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The file, and the rows in words."""
        if self.rows is None:
            return self.file
        first, end = self.rows
        return f"{self.file}: row {first}" if end - first == 1 else f"{self.file}: rows {first} to {end - 1}"

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def damaged(root: Path, damages: Sequence[Damage]) -> DataError:
    """Damage as an error: the first in full, how many more there are."""
    first, more = damages[0], f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""
    rows = ", ".join(first.row_ids[:3]) + (" …" if len(first.row_ids) > 3 else "")
    return DataError(
        first.what + more,
        where=f"{root}/{first.where}" + (f" ({rows})" if rows else ""),
        expected=first.expected,
        got=first.got,
        do=first.do,
    )
