"""Train or held out, by a hash of the prompt: a prompt stays on its side when others come or go."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Split = Literal["train", "held_out"]
Ids = Sequence[int] | npt.NDArray[np.int32]


def prompt_id(ids: Ids) -> str:
    """24 hex digits of sha256 over the prompt's ids as int32, little endian."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()[:24]


def row_id(ids: Ids, mask: Sequence[int]) -> str:
    """24 hex digits of sha256 over a row's ids as int32, little endian, and its mask bytes."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes() + bytes(mask)).hexdigest()[:24]


def split_of(prompt: str, seed: int, held_out_share: float) -> Split:
    """The side of the prompt with id `prompt`."""
    value = int.from_bytes(hashlib.sha256(f"{seed}\0{prompt}".encode()).digest()[:8], "big") / 2**64
    return "held_out" if value < held_out_share else "train"
