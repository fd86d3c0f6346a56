"""Small stores of the tiny target's own states, written as speculators 0.4 writes them, to be changed in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.bridges.stores import open_store
from stages.capture.findings import Finding
from stages.capture.values import check_values, read_all
from stages.targets._decoder import Decoder
from tests import line, tiny
from tests.bridges import samples as make

Sample = make.Sample
POINTS, LAST = tiny.POINTS, tiny.LAYERS
IDS = (0, 2, 4, 5)  # of these points and the last, as speculators 0.3 and 0.4 write them


def states_of(target: Decoder, ids: Tensor, points: Sequence[int] = (*POINTS, LAST)) -> Tensor:
    """bf16 [L, S, H] at `points`."""
    stream = target.packed(ids, [len(ids)], points)
    return torch.stack([stream.states[p] for p in points], 1).bfloat16()


def answered(target: Decoder, folder: Path, rows: int = 8) -> list[Sample]:
    """Rows that the target answered greedily, of different lengths."""
    made = line.make_rows(target, folder, line.TinySource("code", "coding", rows))
    pairs = [(torch.tensor(r["input_ids"]), torch.tensor(r["loss_mask"])) for r in made]
    return [Sample(ids, mask, states_of(target, ids)) for ids, mask in pairs]


def write(root: Path, samples: Sequence[Sample], changes: dict[int, Callable[[dict[str, Any]], None]]) -> Path:
    """data_{i}.pt in rows_0-{n}; `changes` edit the dict of a file before it is saved."""
    folder = make.legacy(root / f"rows_0-{len(samples)}", samples, IDS)
    for i, change in changes.items():
        sample = make.legacy_dict(Sample(*(part.clone() for part in samples[i])))
        change(sample)
        torch.save(sample, folder / f"data_{i}.pt")
    return root


def look(root: Path, target: Decoder | None = None, **asked: Any) -> list[Finding]:
    """The value checks over every row of the store at `root`."""
    store = open_store(root)
    rows = read_all(lambda file: store.rows_of(file, uneven=True), store.files)
    asked = {"points": POINTS, "last_state": store.kind.last_state, "computed": "float32"} | asked
    return check_values(rows, target=target, probe_rows=99, **asked)


def faults(found: Sequence[Finding]) -> list[Finding]:
    return [f for f in found if not f.note]
