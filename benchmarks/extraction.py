"""Extraction against a bare forward pass over the same unpadded rows, interleaved in one run; and the store's size.

    python -m benchmarks.extraction

Prints tokens/s of both, the median of the paired ratios (at least 0.85) and stored bytes a token over 8·H (at most 1.02).
The ratio by CPU seconds stands beside it: it holds still when the machine is busy with other work.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from stages.capture.rows import FolderPlan, Row, row_id
from stages.capture.spill import batches, capture_rows
from stages.capture.store import ROWS, write_folder
from stages.contracts.manifest import CaptureSpec
from stages.contracts.params import load_params
from stages.targets import load_target, locate_target

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

REPEATS = 5
TOKENS = 2000
MIN_RATIO, MAX_BYTES_RATIO = 0.85, 1.02


def make_rows(tokens: int, vocab_size: int) -> tuple[Row, ...]:
    """Rows of 60 to 400 random tokens; time does not depend on which."""
    rng = np.random.default_rng(7)
    rows: list[Row] = []
    while sum(map(len, rows)) < tokens:
        ids = rng.integers(0, vocab_size, rng.integers(60, 400)).astype(np.int32)
        mask = (np.arange(len(ids)) > len(ids) // 2).astype(np.uint8)
        rows.append(Row(row_id(ids, mask), ids, mask))
    return tuple(rows)


def bare(target: Decoder, rows: tuple[Row, ...], tokens_per_batch: int) -> None:
    """The target's layers over the rows, nothing kept, nothing padded, no logits."""
    for batch in batches(rows, tokens_per_batch):
        ids = torch.cat([torch.from_numpy(row.input_ids) for row in batch]).long()
        target.packed(ids, [len(row) for row in batch])


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.target.threads)
    target = load_target(locate_target(params.target.origin), params.target.device, params.target.dtype).pack()
    spec = CaptureSpec(
        weights_digest="benchmark",
        code_digest="benchmark",
        points=params.capture.points,
        layers=target.config.layers,
        hidden_size=target.config.hidden_size,
        compute_dtype=params.target.dtype,
    )
    plan = FolderPlan("benchmark", 0, make_rows(TOKENS, target.config.vocab_size))
    batch = params.capture.tokens_per_batch
    with tempfile.TemporaryDirectory(dir=".cache") as folder:
        path = Path(folder) / plan.name

        def extract() -> None:
            write_folder(path, plan, spec, capture_rows(target, plan.rows, spec.points, batch))

        bare(target, plan.rows[:4], batch)
        pairs = []
        for repeat in range(REPEATS):
            arms: list[Callable[[], object]] = [lambda: bare(target, plan.rows, batch), extract]
            order = (0, 1) if repeat % 2 == 0 else (1, 0)
            took = {arm: seconds(arms[arm]) for arm in order}
            pairs.append((took[0], took[1]))
        size = (path / ROWS).stat().st_size
    ratio, cpu_ratio = (statistics.median(one[k] / other[k] for one, other in pairs) for k in (0, 1))
    bytes_ratio = size / plan.tokens / (8 * spec.hidden_size)
    for name, i in (("bare forward", 0), ("extraction", 1)):
        print(f"{name}: {plan.tokens / statistics.median(p[i][0] for p in pairs):.0f} tokens/s")
    print(f"extraction over bare forward: {ratio:.3f} (at least {MIN_RATIO}), {REPEATS} pairs of {plan.tokens} tokens")
    print(f"the same by CPU seconds: {cpu_ratio:.3f}")
    print(f"store bytes per token over 8·H: {bytes_ratio:.4f} (at most {MAX_BYTES_RATIO})")
    if ratio < MIN_RATIO or bytes_ratio > MAX_BYTES_RATIO:
        sys.exit(1)


if __name__ == "__main__":
    main()
