"""Finishing an extraction: the folders that are lacking, then all of them below data/hidden_states."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from stages.capture.quarantine import keep_unreadable
from stages.capture.rows import FolderPlan, Row
from stages.capture.work import WorkCache
from stages.capture.writing import write_folder
from stages.contracts.manifest import CAPTURE_MANIFEST, FolderConfig
from stages.contracts.progress import progress

StatesOf = Callable[[list[Row]], Iterator[Tensor]]
_OTHER_BITS = (
    "rows that were computed again differ in bits from those that were lost (another batch, library or machine): the store "
    "has another digest, and what was made of it is made again"
)


def compute(
    states_of: StatesOf, plan: FolderPlan, cache: WorkCache, groups: Sequence[Sequence[Row]]
) -> Iterator[Tensor]:
    """States of the rows of `plan` that the cache lacks. Each group is a batch of its own, whatever stands beside it."""
    missing = cache.missing(plan)
    if len(missing) == len(plan.rows):
        yield from states_of(missing)
        return
    lacking = {row.row_id for row in missing}
    for group in groups:
        if rows := [row for row in group if row.row_id in lacking]:
            yield from states_of(rows)


def take_in(plan: FolderPlan, config: FolderConfig, cache: WorkCache) -> None:
    """Note a folder that was just finished, and tell when it has other bits than the one that was lost."""
    if not cache.note(config):
        print(f"extract: {plan.name}: {_OTHER_BITS}", file=sys.stderr, flush=True)


def finish_folders(
    states_of: StatesOf, plans: Sequence[FolderPlan], cache: WorkCache, tokens_per_batch: int, tokens: int
) -> float:
    """Make what the work cache lacks, folder by folder; each is whole when it appears there.

    Args:
        states_of: states bf16 [L, S, H] of rows, in order, from the target or an adopted store.
        tokens_per_batch: of the target; a row group is what goes through it together.
        tokens: how many of the rows' tokens stand in no finished folder, for the bar.

    Returns:
        seconds it took.
    """
    started, done = time.monotonic(), 0
    with progress(max(tokens, 1), "extract", "tokens") as advance:

        def counted(states: Iterator[Tensor]) -> Iterator[Tensor]:
            nonlocal done
            for state in states:
                done += len(state)
                advance(len(state), f"{done / (time.monotonic() - started):.0f} tokens/s")
                yield state

        for plan in plans:
            if not cache.has(plan.row_ids):
                groups = cache.cut(plan, tokens_per_batch)
                states = cache.states(plan, counted(compute(states_of, plan, cache, groups)))
                config = write_folder(cache.path(plan.row_ids), plan, cache.capture, states, groups)
                take_in(plan, config, cache)
    return time.monotonic() - started


def link_folders(plans: Sequence[FolderPlan], cache: WorkCache, output: Path) -> list[FolderConfig]:
    """Put every planned folder below `output` and remove what else is there; the manifest is not written yet."""
    cache.damages += keep_unreadable(output / CAPTURE_MANIFEST.name, cache.quarantine)
    (output / CAPTURE_MANIFEST.name).unlink(missing_ok=True)
    names = {plan.name for plan in plans}
    for strange in output.iterdir():
        if strange.name not in names:
            shutil.rmtree(strange) if strange.is_dir() else strange.unlink()
    return [cache.link(plan, output) for plan in plans]
