"""The row store against plain files: random reads, writes, and what 5 % new rows cost.

    python -m benchmarks.store

Reads: random rows from warm page cache, as tensors to compute on (floor 20 times torch.load of a file a row, as peers
write them) and copied into a batch's memory. Writes: a folder with all its digests over a plain sequential write of the same
states, both synced to the disk (floor 0.8, median of pairs). Growth: every source of a corpus grows by 5 %; rows that go
through the target again over rows that are new (1.0 is the floor), with the share that a cache of whole folders alone would
compute beside it. Arms are interleaved in one run.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.capture.rows import FolderPlan, Row, plan_folders, row_id
from stages.capture.store import RowFolder, folder_bytes, write_folder
from stages.capture.work import WorkCache
from stages.contracts.manifest import CaptureSpec

ROWS, HIDDEN, REPEATS, READS = 96, 576, 5, 300
SOURCES, GROWN, PER_FOLDER = 4, 105, 64
WRITTEN_ROWS, WRITES = 192, 31
MIN_READS_RATIO, MIN_WRITE_RATIO, MAX_RECOMPUTED = 20.0, 0.8, 1.0
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


def make_states(rows: Sequence[Row], hidden: int) -> Iterator[Tensor]:
    for i, row in enumerate(rows):
        yield torch.full((len(row), 4, hidden), float(i), dtype=torch.bfloat16)


def write_arms(folder: Path, rows: list[Row]) -> dict[str, Callable[[int], list[Tensor]]]:
    """The same rows in three stores; each arm gives the states of row i."""
    plan = next(plan_folders({"a": rows}, len(rows)))
    write_folder(folder / plan.name, plan, SPEC, make_states(rows, HIDDEN))
    for i, (row, states) in enumerate(zip(rows, make_states(rows, HIDDEN), strict=True)):
        ids, mask = torch.from_numpy(row.input_ids).long(), torch.from_numpy(row.loss_mask).long()
        slots = [s.contiguous() for s in states.unbind(1)]
        torch.save({"input_ids": ids, "hidden_states": slots, "loss_mask": mask}, folder / f"data_{i}.pt")
        save_file({"hidden_states": states, "token_ids": ids, "loss_mask": mask}, folder / f"hs_{i}.safetensors")
    opened = RowFolder(folder / plan.name)
    for i in range(len(rows)):
        opened.row(i)  # digests are taken once a process, not at each read
    return {
        "row store": lambda i: [opened.row(i)[0]],
        "safetensors a row": lambda i: [load_file(folder / f"hs_{i}.safetensors")["hidden_states"]],
        "torch.load a row": lambda i: torch.load(folder / f"data_{i}.pt", weights_only=True)["hidden_states"],
    }


def read_rates(arms: dict[str, Callable[[int], list[Tensor]]], longest: int) -> dict[str, tuple[float, float]]:
    """Median rows/s of each arm over the same random rows: as tensors, and copied into a batch's memory."""
    rng = np.random.default_rng(3)
    batch = torch.empty(longest * 4, HIDDEN, dtype=torch.bfloat16)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}

    def copied(tensors: list[Tensor]) -> None:
        at = 0
        for tensor in tensors:
            flat = tensor.view(-1, HIDDEN)
            batch[at : at + len(flat)] = flat
            at += len(flat)

    for _ in range(REPEATS):
        order = rng.integers(0, ROWS, READS).tolist()
        for name, read in arms.items():
            started = time.perf_counter()
            for i in order:
                read(i)
            middle = time.perf_counter()
            for i in order:
                copied(read(i))
            rates[name].append((READS / (middle - started), READS / (time.perf_counter() - middle)))
    return {name: (statistics.median(a for a, _ in f), statistics.median(b for _, b in f)) for name, f in rates.items()}


def plain_write(path: Path, states: Sequence[Tensor]) -> None:
    """The same states, one behind the other, synced."""
    with path.open("wb") as file:
        for state in states:
            file.write(state.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_rates(folder: Path) -> tuple[float, float, float]:
    """MB/s of the store and of a plain write, and the median ratio of pairs; each write is to a new name."""
    rows = make_rows(WRITTEN_ROWS, 5, 400)
    plan, states = FolderPlan("a", 0, tuple(rows)), list(make_states(rows, HIDDEN))
    size = folder_bytes(SPEC, plan.rows)
    arms: list[Callable[[Path], object]] = [
        lambda path: write_folder(path, plan, SPEC, iter(states)),
        lambda path: plain_write(path, states),
    ]
    for arm in arms:  # once before the clock
        arm(folder / "warm")
        remove(folder / "warm")
    pairs: list[tuple[float, float]] = []
    for repeat in range(WRITES):
        took = [0.0, 0.0]
        for arm in (0, 1) if repeat % 2 == 0 else (1, 0):
            path = folder / f"{repeat}-{arm}"
            started = time.perf_counter()
            arms[arm](path)
            took[arm] = time.perf_counter() - started
            remove(path)
        pairs.append((took[0], took[1]))
    ours, plain = (size / 1e6 / statistics.median(p[k] for p in pairs) for k in (0, 1))
    return ours, plain, statistics.median(b / a for a, b in pairs)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


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
        rates = read_rates(write_arms(Path(folder), make_rows(ROWS, 1, 400)), 400)
        ours, plain, write_ratio = write_rates(Path(folder))
        recomputed, whole_folders = growth(Path(folder) / "states")
    own = rates["row store"]
    for name, (read, copied) in rates.items():
        print(
            f"{name}: {read:.0f} random rows/s, row store is {own[0] / read:.1f} times as fast; "
            f"copied into a batch {copied:.0f} rows/s, {own[1] / copied:.1f} times"
        )
    reads_ratio = own[0] / rates["torch.load a row"][0]
    print(f"random reads over torch.load of a file a row: {reads_ratio:.1f} (at least {MIN_READS_RATIO:.0f})")
    print(f"writes: {ours:.0f} MB/s, plain sequential {plain:.0f} MB/s: {write_ratio:.2f} (at least {MIN_WRITE_RATIO})")
    print(f"5 % new rows: {recomputed:.2f} rows computed per new row ({whole_folders:.2f} with whole folders only)")
    if reads_ratio < MIN_READS_RATIO or write_ratio < MIN_WRITE_RATIO or recomputed > MAX_RECOMPUTED:
        sys.exit(1)


if __name__ == "__main__":
    main()
