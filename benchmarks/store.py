"""The row store against one file a row, as peers write them; and what 5 % new rows cost.

    python -m benchmarks.store

Random rows are read whole into fresh memory, from warm page cache, arms interleaved. Then every source of a corpus grows
by 5 %: rows that go through the target again over rows that are new (1.0 is the floor), with the share that a cache of
whole folders alone would compute beside it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.capture.rows import Row, plan_folders, row_id
from stages.capture.store import RowFolder, write_folder
from stages.capture.work import WorkCache
from stages.contracts.manifest import CaptureSpec

ROWS, HIDDEN, REPEATS, READS = 96, 576, 5, 300
SOURCES, GROWN, PER_FOLDER = 4, 105, 64
MAX_RECOMPUTED = 1.0
SPEC = CaptureSpec(
    weights_digest="benchmark",
    code_digest="benchmark",
    points=(3, 16, 28),
    layers=30,
    hidden_size=HIDDEN,
    compute_dtype="float32",
)


def make_rows(count: int, seed: int, longest: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids = rng.integers(0, 49152, rng.integers(longest // 4, longest)).astype(np.int32)
        mask = np.ones(len(ids), np.uint8)
        rows.append(Row(row_id(ids, mask), ids, mask))
    return rows


def make_states(rows: tuple[Row, ...] | list[Row], hidden: int) -> Iterator[Tensor]:
    for i, row in enumerate(rows):
        yield torch.full((len(row), 4, hidden), float(i), dtype=torch.bfloat16)


def write_arms(folder: Path, rows: list[Row]) -> dict[str, Callable[[int], object]]:
    """The same rows in three stores; each arm reads row i whole."""
    plan = next(plan_folders({"a": rows}, len(rows)))
    write_folder(folder / plan.name, plan, SPEC, make_states(rows, HIDDEN))
    for i, (row, states) in enumerate(zip(rows, make_states(rows, HIDDEN), strict=True)):
        ids, mask = torch.from_numpy(row.input_ids).long(), torch.from_numpy(row.loss_mask).long()
        slots = [s.contiguous() for s in states.unbind(1)]
        torch.save({"input_ids": ids, "hidden_states": slots, "loss_mask": mask}, folder / f"data_{i}.pt")
        save_file({"hidden_states": states, "token_ids": ids, "loss_mask": mask}, folder / f"hs_{i}.safetensors")
    opened = RowFolder(folder / plan.name)
    return {
        "row store": lambda i: [t.clone() for t in opened.row(i)],
        "safetensors a row": lambda i: load_file(folder / f"hs_{i}.safetensors"),
        "torch.save a row": lambda i: torch.load(folder / f"data_{i}.pt", weights_only=True),
    }


def read_rates(arms: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """Median rows/s of each arm, over the same random rows."""
    rng = np.random.default_rng(3)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(REPEATS):
        order = rng.integers(0, ROWS, READS).tolist()
        for name, read in arms.items():
            started = time.perf_counter()
            for i in order:
                read(i)
            rates[name].append(READS / (time.perf_counter() - started))
    return {name: statistics.median(found) for name, found in rates.items()}


def growth(folder: Path) -> tuple[float, float]:
    """Rows computed over rows new after 5 % growth of every source: with reuse by row, and with whole folders only."""
    grown = {f"source_{s}": make_rows(GROWN, 100 + s, 12) for s in range(SOURCES)}
    first = {name: rows[:100] for name, rows in grown.items()}
    spec = SPEC.model_copy(update={"hidden_size": 8})
    cache = WorkCache(spec, folder)
    for plan in plan_folders(first, PER_FOLDER):
        cache.note(write_folder(cache.path(plan.row_ids), plan, spec, make_states(plan.rows, 8)))
    plans = list(plan_folders(grown, PER_FOLDER))
    new = sum(len(rows) for rows in grown.values()) - sum(len(rows) for rows in first.values())
    by_row = sum(len(cache.missing(plan)) for plan in plans)
    by_folder = sum(len(plan.rows) for plan in plans if not cache.has(plan.row_ids))
    return by_row / new, by_folder / new


def main() -> None:
    torch.set_num_threads(1)
    Path(".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=".cache") as folder:
        rates = read_rates(write_arms(Path(folder), make_rows(ROWS, 1, 400)))
        recomputed, whole_folders = growth(Path(folder) / "states")
    for name, rate in rates.items():
        print(f"{name}: {rate:.0f} random rows/s, row store is {rates['row store'] / rate:.2f} times as fast")
    print(f"5 % new rows: {recomputed:.2f} rows computed per new row ({whole_folders:.2f} with whole folders only)")
    if recomputed > MAX_RECOMPUTED:
        sys.exit(1)


if __name__ == "__main__":
    main()
