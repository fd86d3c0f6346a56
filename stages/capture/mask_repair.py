"""Loss masks against the tokens they stand beside, and the masks that are to stand there. States are never touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath

import torch
from torch import Tensor

from stages.capture.findings import Finding, RowLike
from stages.capture.mask_order import MaskFacts, MaskOrder, find_order
from stages.capture.masks import Masks
from stages.contracts.errors import DataError

_MEND = (
    "`python -m stages.mend_masks FOLDER OUT` writes a copy with every mask in its place; adopted (capture.adopt), rows take the "
    "prepared masks. The states are these tokens', so nothing is extracted again"
)
_ADOPT = "adopted (capture.adopt), rows take the prepared masks; else leave the row out"


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
    explained = explain({row.number: row for row in rows})
    order = explained[0] if explained else None
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
        yield Finding(
            "mask", files[row.number], row.number, what, expected, found, _ADOPT, detail={"differ": len(differ)}
        )


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
    return Finding("mask_order", folder_of(files[one]), None, what, "each row's own mask", found, _MEND, detail=detail)


def explain(rows: Mapping[int, MaskFacts]) -> tuple[MaskOrder, Mapping[int, MaskFacts]] | None:
    """What puts a folder's masks in order, and the rows it was told from: with what the template says of their masks, or by
    lengths alone where the masks follow another rule than the template's."""
    plain = {number: replace(row, right=None) for number, row in rows.items()}
    for told in (rows, plain):
        if (order := find_order(list(told.values()))) is not None:
            return order, told
    return None


def own_masks(
    files: Mapping[int, str], rows: Mapping[int, MaskFacts], order: MaskOrder
) -> tuple[dict[int, bytes], set[int]]:
    """The masks of the rows that stand beside another row's, by the number of the file, and which of them were made.

    A row's own mask is taken where it stands whole in another file; else it is made from the tokens.

    Args:
        files, rows: of one folder, by number; a row that could not be read is missing.

    Raises:
        DataError: a mask that was cut to the length of the shorter row it stands beside, or whose file is missing, where no
            template tells the mask, or the template finds nothing to supervise.
    """
    masks, made = dict[int, bytes](), set[int]()
    for number in order.misplaced:
        row, beside = rows[number], rows.get(order.source[number])
        if beside is not None and len(beside.mask) >= row.tokens:
            masks[number] = beside.mask[: row.tokens]
        else:
            masks[number] = _made(files[number], row, order.source[number], beside)
            made.add(number)
    return masks, made


def _made(file: str, row: MaskFacts, source: int, beside: MaskFacts | None) -> bytes:
    """The mask that a row's tokens give."""
    if row.right is None or not any(row.right):
        raise DataError(
            "A row's own mask is not whole" if row.right is None else "No loss mask can be rebuilt for a row",
            where=f"{file}: its mask stands in number {source}",
            expected=f"{row.tokens} values, or a chat template that gives them: an assistant's header and an answer",
            got="no such row" if beside is None else f"{len(beside.mask)}, cut to that row's length",
            do="put the target at hand (target.origin in params.yaml), whose template rebuilds masks; or leave the row out",
        )
    return row.right
