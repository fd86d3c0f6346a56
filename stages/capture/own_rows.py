"""Rows of our own store as value checks take them."""

from __future__ import annotations

from collections.abc import Iterator

from stages.capture.findings import RowHead
from stages.capture.store import RowStore


def own_rows(store: RowStore, folder: str, most: int | None = None) -> Iterator[RowHead]:
    """The rows of a folder, in order, the first `most` of them: as they lie on the disk, named by row_id and folder. Of
    smaller forms the tokens that have states, and no last state where only some are stored.

    Raises:
        DataError: the folder cannot be opened.
    """
    opened = store.folder(folder)
    whole = opened.config.capture.form.last == "all"
    for i, row_id in enumerate(opened.config.row_ids[:most]):
        states, ids, mask = opened.view(i)
        tokens = int(opened.kept(i)[:, 0].sum())
        *aux, last = states[:tokens].unbind(1)
        yield RowHead(row_id, folder, ids[:tokens], mask[:tokens], tuple(aux), last if whole else None)
