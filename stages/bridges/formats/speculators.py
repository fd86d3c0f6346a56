"""speculators from 0.5 on: flat hs_{i}.safetensors.

A sample: hidden_states bf16 [L, 4, H], slot 3 before the final norm; token_ids i64 [L]. Masks live in an Arrow data set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.bridges.handing import Parcel
from stages.bridges.kinds import ForeignRow, Look, StoreFile, StoreKind

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE = re.compile(r"hs_(?P<index>\d+)\.safetensors")
_SLOTS = 4
_ARROW = "data-00000-of-00001.arrow"
SIDE_FILES = frozenset(
    {
        "data_config.json",
        "sample_lengths.json",
        "token_freq.pt",
        "dataset_info.json",
        "state.json",
        _ARROW,
        "handed_over.json",
    }
)
CONFIG = "data_config.json"
NUMBERING = "speculators"
LAST_STATE = "before_final_norm"
_BATCH = 256  # rows in a record batch
_LISTS = ("input_ids", "loss_mask")


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE):
        return None
    if look.names.keys and not look.names.keys >= {"hidden_states", "token_ids"}:
        return None
    written = look.config is not None and layer_ids(look.config) is not None
    dialect = "speculators" if written else None
    return StoreKind("speculators", ">=0.5", dialect, "before_final_norm", "hs_{i}.safetensors", "speculators")


def read(sample: dict[str, Any], file: StoreFile, path: Path) -> Iterator[ForeignRow]:
    """The one row of hs_{i}.safetensors, without a mask.

    Raises:
        DataError: a part is missing, or parts do not fit each other.
    """
    from stages.bridges._open import damaged
    from stages.bridges._rows import demand_keys, make_row, states

    demand_keys(sample, ("hidden_states", "token_ids"), path)
    stacked = states(sample["hidden_states"], "hidden_states", path, dims=3)
    if stacked.shape[1] < _SLOTS:
        got = f"{stacked.shape[1]} states"
        raise damaged(path, "A sample lacks a state", expected="three auxiliary ones and the last", got=got)
    *aux, last = stacked.unbind(1)
    assert file.index is not None
    yield make_row(file.index, file.path, path, ids=sample["token_ids"], mask=None, aux=aux, last=last)


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    told = config.get("hidden_states")
    ids = told.get("layer_ids") if isinstance(told, dict) else None
    return ids if isinstance(ids, list) and all(type(i) is int for i in ids) else None


def write(root: Path, parcel: Parcel) -> str:
    """hidden_states/hs_{i}.safetensors, the Arrow data set that holds masks, and d2t/t2d; returns how to train on it.

    The trainer splits by place, so training rows come first: the ratio told is that of their number.
    """
    import numpy as np
    from safetensors.torch import save_file

    states = root / "hidden_states"
    states.mkdir(parents=True)
    table = _Table(root)
    train = 0
    for i, row in enumerate(parcel.rows):
        assert train == i or row.split == "held_out", "training rows come first"
        train += row.split == "train"
        save_file(
            {"hidden_states": row.states.contiguous(), "token_ids": row.input_ids}, states / f"hs_{i}.safetensors"
        )
        table.add(row.input_ids, row.loss_mask)
    rows, size = table.close(), len(parcel.d2t)
    np.save(root / f"d2t-{size}.npy", parcel.d2t.numpy())
    np.save(root / f"t2d-{size}.npy", parcel.t2d.numpy())
    ratio = 1.0 if train == rows else (train + 0.5) / rows  # int(rows * ratio) is `train`, whatever rounding does
    ids = " ".join(map(str, parcel.layer_ids))
    return f"--draft-vocab-size {size} --target-layer-ids {ids} --train-data-ratio {ratio:.9g} --on-missing raise"


class _Table:
    """A data set as `datasets` saves it to disk: input_ids, loss_mask and seq_len of each row, one Arrow stream."""

    def __init__(self, root: Path) -> None:
        import pyarrow as pa

        self._pa, self._root, self._rows, self._waiting = pa, root, 0, {n: [] for n in (*_LISTS, "seq_len")}
        lists = [(n, pa.list_(pa.int64())) for n in _LISTS]
        self._schema = pa.schema([*lists, ("seq_len", pa.int64())])
        self._file = (root / _ARROW).open("wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)

    def add(self, ids: Tensor, mask: Tensor) -> None:
        for name, value in zip((*_LISTS, "seq_len"), (ids.numpy(), mask.numpy(), len(ids)), strict=True):
            self._waiting[name].append(value)
        self._rows += 1
        if len(self._waiting["seq_len"]) == _BATCH:
            self._flush()

    def _flush(self) -> None:
        self._stream.write_batch(self._pa.RecordBatch.from_pydict(self._waiting, self._schema))
        self._waiting = {n: [] for n in self._waiting}

    def close(self) -> int:
        """Finish the stream and write the two files that describe it; return the number of rows."""
        if self._waiting["seq_len"]:
            self._flush()
        self._stream.close()
        self._file.close()
        value = {"dtype": "int64", "_type": "Value"}
        features = {n: {"feature": value, "_type": "List"} for n in _LISTS} | {"seq_len": value}
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        state = {
            "_data_files": [{"filename": _ARROW}],
            "_fingerprint": "0" * 16,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        }
        (self._root / "dataset_info.json").write_text(json.dumps(info, indent=2))
        (self._root / "state.json").write_text(json.dumps(state, indent=2))
        return self._rows
