"""From the tensors of a foreign file to one checked row. L tokens, H hidden size; a fault names the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.bridges._open import damaged
from stages.bridges.kinds import ForeignRow, StoreFile

_STATES = (torch.bfloat16, torch.float16, torch.float32)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


def demand_keys(sample: dict[str, Any], keys: Sequence[str], path: Path, older: dict[str, str] | None = None) -> None:
    """Raises DataError when a key is missing. `older`: keys that give an older schema away, with its name."""
    missing = [k for k in keys if k not in sample]
    if not missing:
        return
    era = next((name for key, name in (older or {}).items() if key in sample), None)
    raise damaged(
        path,
        f"A sample is of an older schema ({era})" if era else "A sample lacks a part",
        expected=", ".join(keys),
        got=", ".join(map(str, sample)) or "no keys",
        do="extract this row again with one version of the tool; rows of two schemas cannot be mixed",
    )


def tensor(value: Any, name: str, path: Path, dims: int) -> Tensor:
    """`value` as a plain tensor of `dims` dimensions, a leading batch of one dropped.

    Raises:
        DataError: no tensor, another shape, or a view that claims more values than the file holds.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise damaged(path, f"{name} is no plain tensor", got=type(value).__name__)
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        got = f"{list(value.shape)} from {value.untyped_storage().nbytes()} bytes"
        raise damaged(path, f"{name} claims more values than the file holds", got=got)
    if value.dim() == dims + 1 and value.shape[0] == 1:
        value = value[0]
    if value.dim() != dims:
        raise damaged(path, f"{name} has another shape", expected=f"{dims} dimensions", got=str(list(value.shape)))
    return value


def states(value: Any, name: str, path: Path, dims: int = 2) -> Tensor:
    """A tensor of states; raises DataError as `tensor` does, and for a dtype that states are not stored in."""
    found = tensor(value, name, path, dims)
    if found.dtype not in _STATES:
        expected = ", ".join(str(d).removeprefix("torch.") for d in _STATES)
        raise damaged(path, f"{name} has a dtype that no states have", expected=expected, got=str(found.dtype))
    return found


def split(value: Tensor, parts: int, name: str, path: Path) -> tuple[Tensor, ...]:
    """[L, parts·H] cut into `parts` views [L, H]."""
    width = value.shape[-1]
    if not width or width % parts:
        raise damaged(path, f"{name} cannot be cut into {parts} states", expected=f"{parts}·H wide", got=str(width))
    return value.split(width // parts, dim=-1)


def make_row(
    index: int | str,
    file: str,
    path: Path,
    *,
    ids: Any,
    mask: Any,
    aux: Sequence[Tensor],
    last: Tensor | None,
    padded: bool = False,
) -> ForeignRow:
    """A row from its parts, checked against each other. ids and mask: [L] or [1, L]; mask may be None.

    Args:
        padded: the tool pads rows to a common length and does not say where: a tail of one repeated, unsupervised token
            is left out, and counted in `padding`.

    Raises:
        DataError: no token, ids that are no whole numbers, states of different widths. Lengths are judged by `demand_even`.
    """
    ids_L = _whole(ids, "input_ids", path).long()
    mask_L = None if mask is None else _mask(mask, path)
    slots = [*aux, *([] if last is None else [last])]
    if not len(ids_L) or not slots:
        raise damaged(path, "A sample has no tokens or no states", got=f"{len(ids_L)} tokens, {len(slots)} states")
    if len({s.shape[-1] for s in slots}) > 1:
        raise damaged(path, "The states of a sample have different widths", got=str([s.shape[-1] for s in slots]))
    row = ForeignRow(index, file, ids_L, mask_L, tuple(aux), last)
    fits = mask_L is not None and len(mask_L) == len(ids_L)
    return row.first(len(ids_L) - _tail(ids_L, mask_L if fits else None)) if padded else row


def read_joined(sample: dict[str, Any], file: StoreFile, path: Path, *, last: str, aux: str) -> ForeignRow:
    """The one row of a file that holds ids, mask, the last state and the auxiliary ones joined on their last dimension.

    Args:
        last, aux: their names in the file.

    Raises:
        DataError: a part is missing, or parts do not fit each other.
    """
    demand_keys(sample, ("input_ids", aux, last), path)
    last_LH, aux_LF = states(sample[last], last, path), states(sample[aux], aux, path)
    parts = split(aux_LF, max(aux_LF.shape[-1] // max(last_LH.shape[-1], 1), 1), aux, path)
    ids, mask = sample["input_ids"], sample.get("loss_mask")
    assert file.index is not None
    return make_row(file.index, file.path, path, ids=ids, mask=mask, aux=parts, last=last_LH, padded=True)


def demand_even(row: ForeignRow, path: Path) -> None:
    """Raises DataError when a row has more or fewer states than tokens. A mask of another length is no reason to leave the
    states: speculators 0.4.0 gave rows the masks of other rows, and a mask is made from the tokens again."""
    slots = [*row.aux, *([] if row.last is None else [row.last])]
    wrong = [f"state {i} {len(s)}" for i, s in enumerate(slots) if len(s) != len(row.input_ids)]
    if wrong:
        what, expected = "The parts of a sample have different lengths", f"{len(row.input_ids)}, as many as tokens"
        raise damaged(path, what, expected=expected, got=", ".join(wrong))


def _whole(value: Any, name: str, path: Path) -> Tensor:
    found = tensor(value, name, path, 1)
    if found.dtype not in _WHOLE:
        raise damaged(path, f"{name} holds no whole numbers", got=str(found.dtype))
    return found


def _mask(value: Any, path: Path) -> Tensor:
    mask = tensor(value, "loss_mask", path, 1)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise damaged(path, "A loss mask holds something else than 0 and 1", got=str(mask.unique().tolist()[:5]))
    return mask.to(torch.uint8)


def _tail(ids: Tensor, mask: Tensor | None) -> int:
    """Tokens at the end that are one repeated token and not supervised; one alone is no padding. Never all of them."""
    same = (ids == ids[-1]) if mask is None else (ids == ids[-1]) & (mask == 0)
    run = int(same.flip(0).long().cumprod(0).sum())
    return 0 if run < 2 else min(run, len(ids) - 1)
