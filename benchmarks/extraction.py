"""Extraction against a bare forward pass over the same unpadded rows, and against padded batches as peers run them.

    python -m benchmarks.extraction

Arms are interleaved in one run; ratios are medians of pairs. Bare: the same decoder, nothing kept (floor 0.90). Padded, same
decoder: each batch of 8 or 32 consecutive rows filled up to its longest, nothing kept. Padded, as peers do: transformers'
own model with an attention mask and output_hidden_states, and a torch.save a row. The ratio by CPU seconds stands beside
each: it holds still when the machine is busy with other work. Then stored bytes a token over 8·H (at most 1.02), and the
time of 5 % new rows over that of a full extraction (at most 0.08), work cache checked and folders linked.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stages.capture.finishing import finish_folders, link_folders
from stages.capture.rows import FolderPlan, Row, plan_folders, row_id
from stages.capture.spill import batches, capture_rows
from stages.capture.store import ROWS, write_folder
from stages.capture.work import WorkCache
from stages.contracts.manifest import CaptureSpec
from stages.contracts.params import load_params
from stages.targets import load_target, locate_target

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

REPEATS, PADDED_REPEATS = 5, 3
TOKENS = 2000
PADDED_TOKENS = 6000  # 32 rows and more
GROWTH_TOKENS = 20000
MIN_RATIO, MAX_BYTES_RATIO, MAX_GROWTH = 0.90, 1.02, 0.08
Work = Callable[[], object]


def make_rows(tokens: int, vocab_size: int, seed: int = 7) -> tuple[Row, ...]:
    """Rows of 60 to 400 random tokens, the last one cut so that it is `tokens` in all; time does not depend on which."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    while (left := tokens - sum(map(len, rows))) > 0:
        ids = rng.integers(0, vocab_size, rng.integers(60, 400))[:left].astype(np.int32)
        mask = (np.arange(len(ids)) > len(ids) // 2).astype(np.uint8)
        rows.append(Row(row_id(ids, mask), ids, mask))
    return tuple(rows)


def bare(target: Decoder, rows: Sequence[Row], tokens_per_batch: int) -> None:
    """The target's layers over the rows, nothing kept, nothing padded, no logits."""
    for batch in batches(rows, tokens_per_batch):
        ids = torch.cat([torch.from_numpy(row.input_ids) for row in batch]).long().to(target.device)
        target.packed(ids, [len(row) for row in batch])


def filled_up(rows: Sequence[Row], size: int) -> list[torch.Tensor]:
    """Batches of `size` consecutive rows, each filled up with zeros to its longest: i64 [B, L]."""
    found = []
    for at in range(0, len(rows), size):
        batch = rows[at : at + size]
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
        for i, row in enumerate(batch):
            ids[i, : len(row)] = torch.from_numpy(row.input_ids)
        found.append(ids)
    return found


def padded(target: Decoder, rows: Sequence[Row], size: int) -> None:
    """The same layers over batches filled up to their longest row."""
    for ids in filled_up(rows, size):
        target.packed(ids.flatten().to(target.device), [ids.shape[1]] * len(ids))


def as_peers(model: Any, rows: Sequence[Row], size: int, points: Sequence[int], folder: Path) -> None:
    """transformers' model over padded batches with all hidden states, a file a row."""
    for n, ids in enumerate(filled_up(rows, size)):
        batch = rows[n * size : (n + 1) * size]
        mask = torch.tensor([[i < len(row) for i in range(ids.shape[1])] for row in batch]).long()
        with torch.inference_mode():
            out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        states = [out.hidden_states[p].bfloat16() for p in (*points, -1)]
        for i, row in enumerate(batch):
            kept = [s[i, : len(row)].clone() for s in states]
            told = {"input_ids": ids[i, : len(row)].clone(), "hidden_states": kept}
            torch.save(told | {"loss_mask": torch.from_numpy(row.loss_mask).long()}, folder / f"data_{n * size + i}.pt")


def seconds(work: Work) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def compare(arms: dict[str, Work], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of every arm, interleaved, the order turned round each time."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for repeat in range(repeats):
        for name in list(arms) if repeat % 2 == 0 else list(arms)[::-1]:
            took[name].append(seconds(arms[name]))
    return took


def ratio(ours: list[tuple[float, float]], other: list[tuple[float, float]], kind: int) -> float:
    """Speed of the first over the second: median of pairs, by wall (0) or CPU (1) seconds."""
    return statistics.median(b[kind] / a[kind] for a, b in zip(ours, other, strict=True))


def peers_model(folder: Path) -> Any:
    """transformers' own model of the target, without its head."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def grow(target: Decoder, spec: CaptureSpec, rows: Sequence[Row], per_batch: int, root: Path) -> tuple[float, float]:
    """Time and tokens of an extraction with 5 % more rows, over those of the full one before it."""
    more = make_rows(sum(map(len, rows)) // 20, target.config.vocab_size, seed=8)
    took: list[float] = []
    tokens: list[int] = []
    for members in (list(rows), [*rows, *more]):
        plans = list(plan_folders({"a": members}, 64))
        (root / "out").mkdir(exist_ok=True)
        started = time.perf_counter()
        cache = WorkCache(spec, root / "states")
        cache.heal(plans)
        tokens.append(sum(len(row) for plan in plans for row in cache.missing(plan)))
        finish_folders(
            lambda rows: capture_rows(target, rows, spec.points, per_batch), plans, cache, per_batch, tokens[-1]
        )
        link_folders(plans, cache, root / "out")
        took.append(time.perf_counter() - started)
    return took[1] / took[0], tokens[1] / tokens[0]


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.target.threads)
    located = locate_target(params.target.origin)
    target = load_target(located, params.target.device, params.target.dtype).pack()
    spec = CaptureSpec(
        weights_digest="benchmark",
        code_digest="benchmark",
        points=params.capture.points,
        layers=target.config.layers,
        hidden_size=target.config.hidden_size,
        compute_dtype=params.target.dtype,
    )
    batch, V = params.capture.tokens_per_batch, target.config.vocab_size
    Path(".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=".cache") as told:
        folder = Path(told)

        def extract(plan: FolderPlan) -> None:
            write_folder(
                folder / plan.name,
                plan,
                spec,
                capture_rows(target, plan.rows, spec.points, batch),
                list(batches(plan.rows, batch)),
            )

        plan, long = (FolderPlan(name, 0, make_rows(n, V)) for name, n in (("short", TOKENS), ("long", PADDED_TOKENS)))
        bare(target, plan.rows[:4], batch)
        took = compare({"bare": lambda: bare(target, plan.rows, batch), "extraction": lambda: extract(plan)}, REPEATS)
        size = (folder / plan.name / ROWS).stat().st_size
        model = peers_model(located)
        arms: dict[str, Work] = {"extraction": lambda: extract(long)}
        for n in (8, 32):
            arms[f"padded {n}, same decoder"] = lambda n=n: padded(target, long.rows, n)
            arms[f"padded {n}, as peers do"] = lambda n=n: as_peers(model, long.rows, n, spec.points, folder)
        against = compare(arms, PADDED_REPEATS)
        grown, grown_tokens = grow(target, spec, make_rows(GROWTH_TOKENS, V, seed=9), batch, folder)
    speed = ratio(took["extraction"], took["bare"], 0)
    bytes_ratio = size / plan.tokens / (8 * spec.hidden_size)
    for name in took:
        print(f"{name}: {plan.tokens / statistics.median(t for t, _ in took[name]):.0f} tokens/s")
    print(f"extraction over bare forward: {speed:.3f} (at least {MIN_RATIO}), {REPEATS} pairs of {plan.tokens} tokens")
    print(f"the same by CPU seconds: {ratio(took['extraction'], took['bare'], 1):.3f}")
    for name in [n for n in against if n != "extraction"]:
        wall, cpu = (ratio(against["extraction"], against[name], k) for k in (0, 1))
        print(
            f"extraction over {name}: {wall:.2f}, by CPU seconds {cpu:.2f}, {PADDED_REPEATS} pairs of {long.tokens} tokens"
        )
    print(f"store bytes per token over 8·H: {bytes_ratio:.4f} (at most {MAX_BYTES_RATIO})")
    print(
        f"5 % new rows: {grown:.3f} of a full extraction's time (at most {MAX_GROWTH}), {grown_tokens:.3f} of its tokens"
    )
    if speed < MIN_RATIO or bytes_ratio > MAX_BYTES_RATIO or grown > MAX_GROWTH:
        sys.exit(1)


if __name__ == "__main__":
    main()
