"""Loss masks against the tokens they stand beside, and rows with their masks mended. States are never touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import torch
from torch import Tensor

from stages.capture.findings import Finding, RowLike
from stages.capture.mask_order import MaskFacts, MaskOrder, find_order
from stages.capture.masks import Masks
from stages.contracts.errors import DataError

_DO = (
    "rebuild the masks from the tokens (`rebuild_masks` in stages/capture/mask_repair.py); the states are these tokens', so "
    "nothing is extracted again"
)


@dataclass(frozen=True, eq=False)
class MendedRow:
    """A row with another mask: all else is the row's own, not a copy."""

    row: RowLike
    loss_mask: Tensor

    @property
    def index(self) -> int | str:
        return self.row.index

    @property
    def file(self) -> str:
        return self.row.file

    @property
    def input_ids(self) -> Tensor:
        return self.row.input_ids

    @property
    def aux(self) -> tuple[Tensor, ...]:
        return self.row.aux

    @property
    def last(self) -> Tensor | None:
        return self.row.last


def mask_facts(row: RowLike, masks_of: Masks | None) -> MaskFacts | None:
    """What is kept of a row to judge its mask by; None for a row without a mask, or whose file bears no number."""
    if row.loss_mask is None or not isinstance(row.index, int):
        return None
    right = _bytes(masks_of(row.input_ids)) if masks_of else None
    return MaskFacts(row.index, len(row.input_ids), _bytes(row.loss_mask), right)


def _bytes(mask: Tensor) -> bytes:
    return mask.to(torch.uint8).contiguous().numpy().tobytes()


def folder_of(file: str) -> str:
    """A run's folder: batches are counted within it."""
    return str(PurePosixPath(file).parent)


def mask_findings(files: dict[int, str], rows: list[MaskFacts]) -> Iterator[Finding]:
    """What the masks of one folder show; files: by number."""
    order = find_order(rows)
    if order is not None:
        yield _permuted(files, order)
    for row in rows:
        if row.right is None or row.mask == row.right or (order and row.number in order.misplaced):
            continue
        differ = [i for i, (a, b) in enumerate(zip(row.mask, row.right, strict=False)) if a != b]
        if not differ:  # then only its length is wrong, which the row says of itself
            continue
        what, expected = "A loss mask is not the one that the tokens give", f"{sum(row.right)} supervised tokens"
        found = f"{sum(row.mask)}; {len(differ)} of {row.tokens} tokens differ, the first is token {differ[0]}"
        yield Finding("mask", files[row.number], row.number, what, expected, found, _DO, detail={"differ": len(differ)})


def _permuted(files: dict[int, str], order: MaskOrder) -> Finding:
    one = order.misplaced[0]
    size = f"of {order.batch} rows" if order.batch else "as large as the folder or larger"
    found = (
        f"{len(order.misplaced)} of {len(order.source)} masks belong to other rows, in batches {size}: the mask of "
        f'{files[one]} stands in number {order.source[one]}, as if sorted as text, "10" before "2" '
        "(speculators 0.4.0 and 0.4.0.1)"
    )
    what = "Loss masks stand beside other rows' tokens"
    detail = {"batch": order.batch, "starts": order.starts, "misplaced": order.misplaced, "source": order.source}
    return Finding("mask_order", folder_of(files[one]), None, what, "each row's own mask", found, _DO, detail=detail)


def rebuild_masks(rows: Iterable[RowLike], masks_of: Masks) -> Iterator[MendedRow]:
    """The rows with the masks that their tokens give.

    Raises:
        DataError: a row in which nothing would be supervised: the rule is another template's.
    """
    for row in rows:
        mask = masks_of(row.input_ids)
        if not mask.any():
            raise DataError(
                "No loss mask can be rebuilt for a row",
                where=f"{row.file}: {row.index}",
                expected="an assistant's header and an answer behind it",
                got=f"{len(row.input_ids)} tokens without one",
                do="check that the template is the one that the rows were rendered with, or leave the row out",
            )
        yield MendedRow(row, mask)


def reorder_masks(rows: Iterable[RowLike], order: MaskOrder) -> Iterator[MendedRow]:
    """The rows of one folder with their own masks back, taken from the files where they stand: needs no template.

    Raises:
        DataError: a mask that was cut to the length of the shorter row it stood beside, or whose file is missing.
    """
    known = list(rows)
    masks = {row.index: row.loss_mask for row in known}
    for row in known:
        source = order.source[int(row.index)]
        mask = masks.get(source)
        if mask is None or len(mask) < len(row.input_ids):
            raise DataError(
                "A row's own mask is not whole",
                where=f"{row.file}: its mask stands beside row {source}",
                expected=f"{len(row.input_ids)} values",
                got="no such row" if mask is None else f"{len(mask)}, cut to that row's length",
                do="rebuild the masks from the tokens instead, which needs the target's chat template",
            )
        yield MendedRow(row, mask[: len(row.input_ids)])
