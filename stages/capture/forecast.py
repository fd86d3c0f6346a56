"""What an extraction is going to cost, told before the first GPU second: rows, tokens, bytes, hours, and the disk's room."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stages.capture.layout import folder_bytes
from stages.capture.rows import FolderPlan, Row
from stages.capture.spill import batches, capture_rows
from stages.capture.work import WorkCache
from stages.contracts.errors import Refusal
from stages.contracts.files import canonical, write_whole

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

_SPARE_BYTES = 64 << 20  # configs, parquet and file system overhead beside the states
_WORTH_A_SAMPLE = 20  # batches; fewer are done before a sample of them says anything
_HOUR = 3600.0
_RATE = "rate.json"


@dataclass(frozen=True)
class Forecast:
    """rows, tokens, bytes, folders: all that is planned. todo: rows that stand in no finished folder. to_write:
    bytes. adopted: whether they come from another tool's store."""

    rows: int
    tokens: int
    bytes: int
    folders: int
    finished_folders: int
    todo: tuple[Row, ...]
    to_write: int
    free: int
    where: Path
    adopted: bool = False

    @property
    def todo_tokens(self) -> int:
        return sum(len(row) for row in self.todo)

    def words(self) -> str:
        return (
            f"{self.rows} rows, {self.tokens} tokens, {self.bytes / 1e9:.2f} GB in {self.folders} folders; "
            f"{self.finished_folders} folders stand in the work cache, {len(self.todo)} rows ({self.todo_tokens} tokens) "
            f"{'are taken from the store' if self.adopted else 'go through the target'}; {self.to_write / 1e9:.2f} GB to write, {self.free / 1e9:.1f} GB free"
        )

    def demand_room(self) -> None:
        """Raises Refusal when the disk cannot hold what is to be written."""
        if self.to_write + _SPARE_BYTES > self.free:
            raise Refusal(
                "The hidden states do not fit on this disk",
                where=str(self.where),
                expected=f"{(self.to_write + _SPARE_BYTES) / 1e9:.2f} GB free",
                got=f"{self.free / 1e9:.2f} GB",
                do="free some, lower prepare.sources' limits, store less (capture.store_aux, store_tokens, store_last), or "
                "move .cache and data to a larger disk",
            )

    def hours(self, tokens_per_s: float, source: str) -> str:
        """How long the target is going to take, in words."""
        seconds = self.todo_tokens / tokens_per_s
        took = f"{seconds / _HOUR:.1f} h" if seconds >= _HOUR else f"{seconds / 60:.1f} min"
        return f"about {took} at {tokens_per_s:.0f} tokens/s ({source})"


def forecast(plans: Sequence[FolderPlan], cache: WorkCache, output: Path) -> Forecast:
    """Count what `plans` ask for and what the cache lacks. Damaged folders have to be found before (WorkCache.heal)."""
    sizes = [folder_bytes(cache.capture, plan.rows) for plan in plans]
    to_write = sum(size for plan, size in zip(plans, sizes, strict=True) if not cache.has(plan.row_ids))
    output.mkdir(parents=True, exist_ok=True)
    if output.stat().st_dev != cache.root.stat().st_dev:
        to_write += sum(sizes)  # no hard link from one file system to another: the folders are copied
    return Forecast(
        rows=sum(len(plan.rows) for plan in plans),
        tokens=sum(plan.tokens for plan in plans),
        bytes=sum(sizes),
        folders=len(plans),
        finished_folders=sum(cache.has(plan.row_ids) for plan in plans),
        todo=tuple(row for plan in plans for row in cache.missing(plan)),
        to_write=to_write,
        free=shutil.disk_usage(cache.root).free,
        where=cache.root,
        adopted=cache.capture.engine.startswith("adopted"),
    )


def sample_rate(target: Decoder, told: Forecast, points: Sequence[int], tokens_per_batch: int) -> float | None:
    """Tokens a second of the first batch, warmed up by its first row; None where so few are to be done that a sample is
    not worth its time."""
    if told.todo_tokens < _WORTH_A_SAMPLE * tokens_per_batch:
        return None

    def seconds(rows: Sequence[Row]) -> float:
        started = time.monotonic()
        for _ in capture_rows(target, rows, points, tokens_per_batch):
            pass
        return time.monotonic() - started

    batch = next(batches(told.todo, tokens_per_batch))
    seconds(batch[:1])
    return sum(len(row) for row in batch) / seconds(batch)


def remembered_rate(cache: Path, device: str) -> float | None:
    """Tokens a second that a target on `device` made with this work cache last, if that is known."""
    try:
        told = json.loads((cache / _RATE).read_bytes())[device]
    except (FileNotFoundError, ValueError, LookupError, TypeError):  # nothing hangs on it
        return None
    return float(told) if isinstance(told, int | float) and told > 0 else None


def remember_rate(cache: Path, device: str, tokens_per_s: float) -> None:
    write_whole(cache / _RATE, canonical({device: tokens_per_s}))


def device_name(device: str) -> str:
    """What a rate is remembered for: the accelerator's own name, or the CPU with its threads."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{device}, {torch.get_num_threads()} threads"
