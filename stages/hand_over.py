"""hand_over: merged rows and states as another tool's trainer reads them. `python -m stages.hand_over FORMAT FOLDER`

FORMAT is specforge or speculators (0.5 and later). What stands in FOLDER is whole or absent; handed_over.json in it says
what it is and how to train on it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from stages.bridges.handing import OutRow, Parcel, choose, demand_own_place, writable_formats
from stages.capture.dialects import layer_ids
from stages.capture.store import RowStore
from stages.contracts.adoption import HandOver
from stages.contracts.errors import Refusal, run
from stages.contracts.files import whole_folder
from stages.contracts.manifest import MERGED, MERGED_MANIFEST, MergedManifest
from stages.contracts.params import load_params
from stages.contracts.progress import progress
from stages.contracts.report import demand
from stages.targets import load_norm, locate_target

_SPARE_BYTES = 64 << 20
_BYTES_A_ROW = 4096  # headers, and what a file system rounds up to


def in_order(index: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Index records, training rows first, else as they stand."""
    return sorted(index, key=lambda record: record["split"] != "train")


def rows_of(index: list[dict[str, Any]], store: RowStore, tokens: int) -> Iterator[OutRow]:
    """Rows of the merged set in the index's order, states as views of the mapped store."""
    with progress(tokens, "hand over", "tokens") as advance:
        for record in index:
            states, ids, mask = store.row(record["folder"], record["row_in_folder"])
            yield OutRow(record["split"], ids.long(), mask.long(), states)
            advance(len(ids))


def norm_of(folder: Path) -> Callable[[Tensor], Tensor]:
    """The target's final norm, bf16 [L, H] to bf16: computed in float32 and rounded once."""
    weight, eps = load_norm(folder)
    return lambda states_LH: F.rms_norm(states_LH.float(), (len(weight),), weight, eps).bfloat16()


def demand_room(root: Path, merged: MergedManifest) -> None:
    """Raises Refusal when the disk cannot hold a copy of the states."""
    spec = merged.capture
    need = 2 * (len(spec.points) + 1) * spec.hidden_size * merged.tokens + _BYTES_A_ROW * merged.rows + _SPARE_BYTES
    there = next(p for p in (root.absolute(), *root.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise Refusal(
            "The store does not fit on this disk",
            where=str(there),
            expected=f"{need / 1e9:.2f} GB free",
            got=f"{free / 1e9:.2f} GB",
            do="free some, or name a folder on a larger disk",
        )


def describe(name: str, merged: MergedManifest, ids: tuple[int, ...], how_to_train: str) -> HandOver:
    wanted = writable_formats()[name]
    return HandOver(
        format=name,
        merged_digest=merged.digest(),
        target=merged.target.name,
        points=merged.capture.points,
        numbering=wanted.NUMBERING,
        layer_ids=ids,
        last_state=wanted.LAST_STATE,
        train_rows=merged.train_rows,
        held_out_rows=merged.held_out_rows,
        tokens=merged.tokens,
        draft_vocab_size=merged.draft_vocab_size,
        how_to_train=how_to_train,
    )


def main() -> None:
    name, root = choose(sys.argv[1:])
    params = load_params()
    torch.set_num_threads(params.target.threads)
    merged = MergedManifest.read(MERGED_MANIFEST)
    demand("training", merged.digest())
    demand_own_place(root)
    demand_room(root, merged)
    wanted, target = writable_formats()[name], merged.target
    ids = layer_ids(merged.capture.points, wanted.NUMBERING, target.model_type, target.layers)
    vocabulary = load_file(MERGED / "vocabulary.safetensors")
    rows = rows_of(in_order(pq.read_table(MERGED / "index.parquet").to_pylist()), RowStore(), merged.tokens)
    norm = norm_of(locate_target(params.target.origin))
    with whole_folder(root) as aside:
        how = wanted.write(aside, Parcel(rows, ids, vocabulary["d2t"], vocabulary["t2d"], norm))
        handed = describe(name, merged, ids, how)
        handed.write(HandOver.path(aside))
    print(f"{root}: {merged.train_rows} training and {merged.held_out_rows} held-out rows for {name}; {how}")


if __name__ == "__main__":
    run(main)
