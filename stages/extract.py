"""extract: the target's residual stream at three points and the last state, for every prepared row."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.capture.code import code_digest
from stages.capture.forecast import Forecast, device_name, forecast, remember_rate, remembered_rate, sample_rate
from stages.capture.quarantine import keep_unreadable
from stages.capture.rows import FolderPlan, Row, plan_folders, read_rows
from stages.capture.spill import capture_rows
from stages.capture.verify import describe_store
from stages.capture.work import WorkCache
from stages.capture.writing import write_folder
from stages.contracts.damage import Damage
from stages.contracts.errors import ParamsError, Refusal, run
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    HIDDEN_STATES,
    PREPARED_MANIFEST,
    WORK,
    CaptureSpec,
    FolderConfig,
    PreparedManifest,
    StoredForm,
    TargetIdentity,
)
from stages.contracts.params import Params, load_params
from stages.contracts.points import check_points
from stages.contracts.progress import progress
from stages.contracts.report import demand
from stages.targets import identify_target, load_target, locate_target

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

_WORTH_REMEMBERING_S = 10.0  # a shorter run's rate is mostly its start


def demand_target(found: TargetIdentity, prepared: TargetIdentity, params: Params) -> None:
    """Raises ParamsError when params.yaml describes another model, Refusal when the rows were prepared for another."""
    told = params.target
    for name in ("layers", "hidden_size", "vocab_size"):
        if getattr(told, name) != getattr(found, name):
            raise ParamsError(
                f"The target has another {name} than params.yaml says",
                where=f"params.yaml: target.{name}",
                expected=f"{getattr(found, name)}, from {told.origin}",
                got=str(getattr(told, name)),
                do="mend target.origin or the figures below it",
            )
    for name, what in (("weights", "weights"), ("tokenizer", "tokenizer"), ("template", "chat template")):
        digests = (getattr(prepared, f"{name}_digest"), getattr(found, f"{name}_digest"))
        if digests[0] != digests[1]:
            raise Refusal(
                f"The target's {what} changed since the rows were prepared",
                where=told.origin,
                expected=f"{digests[0]}, as in {PREPARED_MANIFEST}: answers and token ids are that target's own",
                got=digests[1],
                do="run `dvc repro prepare`, or put the former target back",
            )


def capture_spec(params: Params, target: TargetIdentity) -> CaptureSpec:
    """All that decides the bytes of a stored state, beside the row."""
    return CaptureSpec(
        weights_digest=target.weights_digest,
        code_digest=code_digest(target.model_type),
        points=check_points(params.capture.points, target.layers),
        layers=target.layers,
        hidden_size=target.hidden_size,
        compute_dtype=params.target.dtype,
        form=StoredForm(
            tokens=params.capture.store_tokens, last=params.capture.store_last, aux_dtype=params.capture.store_aux
        ),
    )


def look_ahead(plans: Sequence[FolderPlan], cache: WorkCache, output: Path) -> Forecast:
    """Check the finished folders, tell what was found damaged and what is going to happen.

    Raises:
        Refusal: the disk cannot hold what is to be written.
    """
    cache.take_in(output)
    with progress(max(cache.bytes_to_check(plans), 1), "extract: finished folders checked", "bytes") as advance:
        cache.heal(plans, advance)
    tell_damage(cache.damages, cache.quarantine)
    told = forecast(plans, cache, output)
    tell(told.words())
    told.demand_room()
    return told


def tell(words: str) -> None:
    print(f"extract: {words}", file=sys.stderr, flush=True)


def tell_damage(damages: Sequence[Damage], kept_in: Path) -> None:
    """A line a damaged place; what was found stays in quarantine."""
    for damage in damages:
        tell(f"damaged: {damage.where}: {damage.what} (expected {damage.expected}, got {damage.got})")
    if damages:
        tell(f"{len(damages)} damaged places; their bytes are kept in {kept_in}, the reason beside them")


def tell_hours(target: Decoder, told: Forecast, cache: WorkCache, params: Params) -> None:
    """Hours at the rate that this machine had last, else at that of a short sample."""
    rate, source = remembered_rate(cache.root, device_name(params.target.device)), "as measured here before"
    if rate is None:
        rate = sample_rate(target, told, cache.capture.points, params.capture.tokens_per_batch)
        source = "measured on the first rows"
    if rate:
        tell(told.hours(rate, source))


def compute(
    target: Decoder, plan: FolderPlan, cache: WorkCache, groups: Sequence[Sequence[Row]], tokens_per_batch: int
) -> Iterator[Tensor]:
    """States of the rows of `plan` that the cache lacks. Each group is a batch of its own, whatever stands beside it."""
    missing = cache.missing(plan)
    if len(missing) == len(plan.rows):
        yield from capture_rows(target, missing, cache.capture.points, tokens_per_batch)
        return
    lacking = {row.row_id for row in missing}
    for group in groups:
        if rows := [row for row in group if row.row_id in lacking]:
            yield from capture_rows(target, rows, cache.capture.points, tokens_per_batch)


def finish_folders(
    target: Decoder | None, plans: Sequence[FolderPlan], cache: WorkCache, tokens_per_batch: int, tokens: int
) -> float:
    """Make what the work cache lacks, folder by folder; each is whole when it appears there.

    Args:
        target: None when every row stands somewhere in the cache, and folders are only put together anew.
        tokens: how many go through the target, for the bar.

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
                computed: Iterator[Tensor] = iter(())
                if target is not None:
                    computed = compute(target, plan, cache, groups, tokens_per_batch)
                states = cache.states(plan, counted(computed))
                config = write_folder(cache.path(plan.row_ids), plan, cache.capture, states, groups)
                if not cache.note(config):
                    tell(
                        f"{plan.name}: rows that were computed again differ in bits from those that were lost (another batch, "
                        "library or machine): the store has another digest, and what was made of it is made again"
                    )
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


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.target.threads)
    prepared = PreparedManifest.read(PREPARED_MANIFEST)
    demand("extraction", prepared.digest())
    folder = locate_target(params.target.origin)
    demand_target(identify_target(folder, params.target.name), prepared.target, params)
    plans = list(plan_folders(read_rows(prepared), params.capture.rows_per_folder))
    cache = WorkCache(capture_spec(params, prepared.target), WORK)
    told = look_ahead(plans, cache, HIDDEN_STATES)
    target = load_target(folder, params.target.device, params.target.dtype).pack() if told.todo else None
    if target:
        tell_hours(target, told, cache, params)
    took = finish_folders(target, plans, cache, params.capture.tokens_per_batch, told.todo_tokens)
    if took > _WORTH_REMEMBERING_S and target:
        remember_rate(cache.root, device_name(params.target.device), told.todo_tokens / took)
    known = len(cache.damages)
    folders = link_folders(plans, cache, HIDDEN_STATES)
    tell_damage(cache.damages[known:], cache.quarantine)
    cache.drop_superseded(plans)
    describe_store(prepared.digest(), cache.capture, folders).write(CAPTURE_MANIFEST)


if __name__ == "__main__":
    run(main)
