"""Training batches from the row store against a loader that reads one file a row, as other trainers write them.

    python -m benchmarks.loader

Both make the same batches of the same rows in the same shuffled order, an epoch a pass, in one thread, without reading ahead: `Rows.pack`,
which stages/train.py calls, and torch.load (weights_only) of a .pt a row with the same tensors. A batch is what the trainer takes: token
ids, masks and float32 states, which is also most of the store's time. Passes alternate, in pairs; the ratio is the median of pairs. Cold:
one pass each before the others, the files dropped from the page cache, with the store's sha256 of every group, which it takes at the first
read. The merged set when there is one (`dvc repro merge`), or else 600 synthetic rows in the default target's width.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.store import SPEC, make_rows, make_states
from stages._train_rows import IndexRow, Rows, read_rows
from stages.capture.rows import plan_folders
from stages.capture.store import RowStore, write_folder
from stages.contracts.manifest import HIDDEN_STATES, MERGED_MANIFEST
from stages.drafts.eagle3 import BatchOrder, PackedBatch

ROWS, LONGEST, PER_FOLDER, BATCH_TOKENS, PAIRS = 600, 512, 200, 1024, 9
CPU = torch.device("cpu")
Loader = Callable[[Sequence[int]], PackedBatch]


@dataclass(frozen=True)
class Pass:
    """An epoch: tokens a second, and CPU seconds a million tokens."""

    tokens_per_s: float
    cpu_s: float


def synthetic(folder: Path) -> Rows:
    """A store of noise, about 190,000 tokens."""
    rows, lines = make_rows(ROWS, 1, LONGEST), []
    for plan in plan_folders({"a": rows}, PER_FOLDER):
        write_folder(folder / plan.name, plan, SPEC, make_states(plan.rows, SPEC.hidden_size))
        lines += [IndexRow(row.row_id, "a", plan.name, i, len(row), 1) for i, row in enumerate(plan.rows)]
    return Rows(RowStore(folder), tuple(lines), (), CPU)


def a_file_each(rows: Rows, folder: Path) -> list[Path]:
    """The same rows, a .pt each."""
    files = []
    for n, row in enumerate(rows.train):
        states, ids, mask = rows.store.row(row.folder, row.row_in_folder)
        slots = [slot.contiguous() for slot in states.unbind(1)]
        files.append(folder / f"data_{n}.pt")
        torch.save({"input_ids": ids.long(), "loss_mask": mask.long(), "hidden_states": slots}, files[-1])
    return files


def from_files(rows: Rows, files: Sequence[Path], numbers: Sequence[int]) -> PackedBatch:
    """The batch of these rows, each from its file; states are written once, as `Rows.pack` does."""
    parts = [torch.load(files[n], weights_only=True) for n in numbers]
    slots, T, H = (
        len(parts[0]["hidden_states"]),
        sum(rows.train[n].length for n in numbers),
        parts[0]["hidden_states"][0].shape[1],
    )
    aux, last, at = torch.empty(T, slots - 1, H), torch.empty(T, H), 0
    for part in parts:
        here = slice(at, at := at + len(part["input_ids"]))
        for number, states in enumerate(part["hidden_states"][:-1]):
            aux[here, number] = states
        last[here] = part["hidden_states"][-1]
    return PackedBatch(
        row_ids=tuple(rows.train[n].row_id for n in numbers),
        lengths=tuple(rows.train[n].length for n in numbers),
        input_ids=torch.cat([part["input_ids"] for part in parts]),
        loss_mask=torch.cat([part["loss_mask"] for part in parts]).bool(),
        aux=aux.flatten(1),
        last=last,
    )


def drop_from_cache(files: Sequence[Path]) -> None:
    """Have the next read of these files come from the disk, as far as the system does what it is asked."""
    os.sync()
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def epoch(load: Loader, batches: Sequence[Sequence[int]]) -> Pass:
    wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
    for numbers in batches:
        tokens += len(load(numbers).input_ids)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Pass(tokens / wall, cpu / tokens * 1e6)


def batches_of(rows: Rows, number: int) -> list[list[int]]:
    """Every row once, in the trainer's order of an epoch."""
    order, found = BatchOrder([row.length for row in rows.train], BATCH_TOKENS, number), []
    while sum(map(len, found)) < len(rows.train):
        found.append(order(len(found)))
    return found


def same(a: PackedBatch, b: PackedBatch) -> bool:
    tensors = ("input_ids", "loss_mask", "aux", "last")
    return (a.row_ids, a.lengths) == (b.row_ids, b.lengths) and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in tensors
    )


def compare(rows: Rows, folder: Path) -> None:
    files = a_file_each(rows, folder)
    cold_rows = Rows(RowStore(rows.store.root), rows.train, rows.held_out, CPU)
    stored = sorted({rows.store.root / row.folder / "rows.safetensors" for row in rows.train})
    loaders: list[tuple[str, Loader]] = [
        ("row store", lambda numbers: cold_rows.pack([rows.train[n] for n in numbers])),
        ("a file a row", lambda numbers: from_files(rows, files, numbers)),
    ]
    rows.store._open.clear()  # mapped pages stay in the cache
    drop_from_cache([*stored, *files])
    cold = [epoch(load, batches_of(rows, 0)) for _, load in loaders]
    assert all(same(*(load(numbers) for _, load in loaders)) for numbers in batches_of(rows, 0)), "not the same batches"
    passes: list[list[Pass]] = [[], []]
    for pair in range(PAIRS):
        for arm in (0, 1) if pair % 2 == 0 else (1, 0):
            passes[arm].append(epoch(loaders[arm][1], batches_of(rows, pair + 1)))
    for (name, _), first, found in zip(loaders, cold, passes, strict=True):
        speeds, cpu = sorted(p.tokens_per_s for p in found), statistics.median(p.cpu_s for p in found)
        print(
            f"{name}: {statistics.median(speeds):,.0f} tokens/s ({speeds[0]:,.0f} to {speeds[-1]:,.0f}), {cpu:.2f} CPU-s a million "
            f"tokens; cold {first.tokens_per_s:,.0f} tokens/s, {first.cpu_s:.2f}"
        )
    for what, ratios in (
        ("tokens/s", sorted(a.tokens_per_s / b.tokens_per_s for a, b in zip(*passes, strict=True))),
        ("tokens a CPU second", sorted(b.cpu_s / a.cpu_s for a, b in zip(*passes, strict=True))),
    ):
        print(
            f"row store over a file a row, {what}: {statistics.median(ratios):.2f} (pairs {ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    print(f"cold, tokens/s: {cold[0].tokens_per_s / cold[1].tokens_per_s:.2f}")


def main() -> None:
    torch.set_num_threads(1)
    Path(".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=".cache") as folder:
        apart, store = Path(folder) / "files", Path(folder) / "store"
        apart.mkdir()
        store.mkdir()
        rows = read_rows(RowStore(HIDDEN_STATES), CPU) if MERGED_MANIFEST.exists() else synthetic(store)
        kind = "merged" if MERGED_MANIFEST.exists() else "synthetic"
        tokens = sum(row.length for row in rows.train)
        print(f"{len(rows.train)} {kind} rows, {tokens:,} tokens, batches of {BATCH_TOKENS} row tokens, {PAIRS} pairs")
        sys.stdout.flush()
        compare(rows, apart)


if __name__ == "__main__":
    main()
