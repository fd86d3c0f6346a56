"""SpecForge: rows_{g}-{g+2000}/data_{i}.ckpt, or .ckpt.gz.

A sample (torch.save): input_ids i64 [L], loss_mask i64 [L], hidden_state bf16 [1, L, H] after the final norm,
aux_hidden_state bf16 [1, L, 3H]. No config; rows are padded to the longest of their batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.bridges.handing import OutRow, Parcel
from stages.bridges.kinds import ForeignRow, Look, StoreFile, StoreKind

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE = re.compile(r"data_(?P<index>\d+)\.ckpt(\.gz)?")
SIDE_FILES = frozenset({"vocab_mapping.pt", "handed_over.json"})
CONFIG = ""
NUMBERING = "specforge"
LAST_STATE = "after_final_norm"
_PER_FOLDER = 2000


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE):
        return None
    if look.names.keys and "aux_hidden_state" not in look.names.keys:
        return None
    return StoreKind(
        tool="specforge",
        era="any",
        dialect=None,
        last_state="after_final_norm",
        pattern="rows_{g}-{g+2000}/data_{i}.ckpt" + (".gz" if look.suffix == ".gz" else ""),
        numbering="specforge",
    )


def read(sample: dict[str, Any], file: StoreFile, path: Path) -> Iterator[ForeignRow]:
    """The one row of data_{i}.ckpt, its padding left out.

    Raises:
        DataError: a part is missing, or parts do not fit each other.
    """
    from stages.bridges._rows import read_joined

    yield read_joined(sample, file, path, last="hidden_state", aux="aux_hidden_state")


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    """Nothing beside the samples says which layers they are of."""
    return None


def write(root: Path, parcel: Parcel) -> str:
    """train/ and held_out/ of rows_{g}-{g+2000}/data_{i}.ckpt, unpadded, and vocab_mapping.pt; returns how to train on it.

    The last state is normed here, since this trainer's head reads it normed: in float32, rounded once.
    """
    import torch

    written = {"train": 0, "held_out": 0}
    for row in parcel.rows:
        i = written[row.split]
        written[row.split] += 1
        begin = i // _PER_FOLDER * _PER_FOLDER
        folder = root / row.split / f"rows_{begin}-{begin + _PER_FOLDER}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(_sample(row, parcel), folder / f"data_{i}.ckpt")
    torch.save({"d2t": parcel.d2t, "t2d": parcel.t2d}, root / "vocab_mapping.pt")
    return (
        "hidden states: train/, and held_out/ for evaluation; vocab mapping: vocab_mapping.pt; draft config: "
        f"draft_vocab_size {len(parcel.d2t)}, eagle_config.eagle_aux_hidden_state_layer_ids {list(parcel.layer_ids)}"
    )


def _sample(row: OutRow, parcel: Parcel) -> dict[str, Tensor]:
    tensors = {
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask,
        "hidden_state": parcel.norm(row.states[:, -1])[None],
        "aux_hidden_state": row.states[:, :-1].flatten(1)[None],
    }
    # torch.save writes the storage behind a view: a whole folder of rows
    return {name: tensor.clone() for name, tensor in tensors.items()}
