"""Smaller forms of a stored row: which states are kept, how they are encoded, and how a reader gets a whole row back.

A row comes back as bf16 [L, S, H] whatever its form: states that were not kept are zeros. Training looks at none of them:
with l the loss mask and m the last supervised position, keys and roots end at m-2, and the target's distribution is asked
for at s only where l[s] and l[s+1]. `float8_e4m3` alone changes what training sees: each auxiliary state is divided by its
own scale, so that its largest value becomes 448, and rounded to 4 significant bits (2.4 % of its length is lost).

L tokens of a row, A and E of them with auxiliary and last states, S slots, H hidden size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.contracts.manifest import StoredForm

Mask = npt.NDArray[np.uint8]
_LARGEST = 448.0  # of float8_e4m3
_DEFAULT = StoredForm()


def kept(loss_mask: Mask, form: StoredForm) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which of a row's tokens keep their auxiliary states, and which their last state: bool [L], bool [L]."""
    aux = np.ones(len(loss_mask), np.bool_)
    if form.tokens == "to_last_supervised":
        supervised = np.flatnonzero(loss_mask)
        aux[int(supervised[-1]) + 1 if len(supervised) else 0 :] = False
    last = aux.copy()
    if form.last == "before_supervised":
        last[:-1] &= loss_mask[1:].astype(np.bool_)
        last[-1:] = False
    return aux, last


def encode(states_LSH: Tensor, loss_mask: Mask, form: StoredForm) -> dict[str, Tensor]:
    """The tensors of a row as they are stored: `states`, or `aux`, `last` and where they are needed `scales`."""
    if form == _DEFAULT:
        return {"states": states_LSH}
    aux_L, last_L = (torch.from_numpy(k) for k in kept(loss_mask, form))
    told = {"aux": states_LSH[aux_L, :-1], "last": states_LSH[last_L, -1]}
    if form.aux_dtype == "float8_e4m3":
        told["aux"], told["scales"] = quantise(told["aux"])
    return told


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3 [..., H] and its float32 scale [...]: state = quantised · scale. Infinity and NaN become NaN."""
    scale = states.float().abs().amax(-1) / _LARGEST
    return (states.float() / scale.clamp_min(1e-30)[..., None]).to(torch.float8_e4m3fn), scale


def dequantise(quantised: Tensor, scale: Tensor) -> Tensor:
    return (quantised.float() * scale[..., None]).to(torch.bfloat16)


def decode(stored: dict[str, Tensor], loss_mask: Mask, form: StoredForm) -> Tensor:
    """bf16 [L, S, H] from what `encode` made; states that were not kept are zeros. The default form is not copied."""
    if form == _DEFAULT:
        return stored["states"]
    aux_AH, last_EH = stored["aux"], stored["last"]
    if form.aux_dtype == "float8_e4m3":
        aux_AH = dequantise(aux_AH, stored["scales"])
    aux_L, last_L = (torch.from_numpy(k) for k in kept(loss_mask, form))
    states = torch.zeros(len(loss_mask), aux_AH.shape[1] + 1, aux_AH.shape[2], dtype=torch.bfloat16)
    states[aux_L, :-1] = aux_AH
    states[last_L, -1] = last_EH
    return states


def kept_slots(loss_mask: Mask, form: StoredForm, slots: int) -> Tensor:
    """Which states of a row are kept, bool [L, S]."""
    aux_L, last_L = (torch.from_numpy(k) for k in kept(loss_mask, form))
    return torch.cat([aux_L[:, None].expand(-1, slots - 1), last_L[:, None]], 1)


def as_stored(aux: Tensor, form: StoredForm) -> Tensor:
    """An auxiliary state [..., H] as it would come back from a store that rounds to 8 bits; else as it is."""
    return dequantise(*quantise(aux.to(torch.bfloat16))).to(aux.dtype) if form.aux_dtype == "float8_e4m3" else aux
