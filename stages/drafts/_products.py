"""Matrix products in bfloat16 beside float32 weights, gradients and sums.

oneDNN makes a kernel for every new shape, which costs more than the product itself: rows are therefore filled up with zeros
to a multiple of 64, so that the batches of a run, each of another length, come to few shapes. On a CPU all but the products stays
in float32, which it adds and multiplies faster; on a GPU activations stay in bfloat16, which take half the memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_ROWS = 64
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def filled_up(rows: int) -> int:
    """The number of rows that a product of so many is made with."""
    return -(-rows // _ROWS) * _ROWS


def in_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [n, …] in `dtype`, zeros below up to a multiple of 64 rows."""
    made = x.new_empty((filled_up(len(x)), *x.shape[1:]), dtype=dtype)
    made[: len(x)] = x
    made[len(x) :] = 0
    return made


def lowered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`; a frozen one is turned once and kept, for as long as it lives and is not written to."""
    if weight.requires_grad or weight.dtype == dtype:
        return weight.to(dtype)
    kept = _kept.get(weight)
    if kept is None or kept[0] != weight._version or kept[1].dtype != dtype:
        kept = _kept[weight] = (weight._version, weight.to(dtype))
    return kept[1]


class _LowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        low_x, low_w = in_rows(x, dtype), weight.to(dtype)
        ctx.save_for_backward(low_x, low_w)
        ctx.told = (len(x), x.dtype, weight.dtype)
        y = (low_x @ low_w.T)[: len(x)]
        return y if x.is_cuda else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (low_x, low_w), (n, x_dtype, w_dtype) = ctx.saved_tensors, ctx.told
        dy = in_rows(grads[0], low_w.dtype)
        dx = (dy @ low_w)[:n].to(x_dtype) if ctx.needs_input_grad[0] else None
        dw = (dy.T @ low_x).to(w_dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] @ weight.T, in the dtype of autocast where that is on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return F.linear(x, weight)
    with torch.autocast(kind, enabled=False):
        return _LowLinear.apply(x, weight, torch.get_autocast_dtype(kind))  # type: ignore[no-any-return]


class Linear(torch.nn.Linear):
    """Without a bias, by `linear`."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)
