"""Rows of our own store as value checks take them."""

from __future__ import annotations

from collections.abc import Iterator

from stages.capture.findings import RowHead
from stages.capture.store import RowStore


def own_rows(store: RowStore, folder: str, most: int | None = None) -> Iterator[RowHead]:
    """The rows of a folder, in order, the first `most` of them: views of the mapped file, named by row_id and folder.

    Raises:
        DataError: the folder cannot be opened.
    """
    opened = store.folder(folder)
    for i, row_id in enumerate(opened.config.row_ids[:most]):
        states, ids, mask = opened.row(i)
        *aux, last = states.unbind(1)
        yield RowHead(row_id, folder, ids, mask, tuple(aux), last)
