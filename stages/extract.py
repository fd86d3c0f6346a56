"""extract: the target's residual stream at three points and the last state, for every prepared row.

The target runs over the rows, or states of another tool are adopted (capture.adopt): then only rows it lacks run.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache as cache_once
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.bridges.identity import bridge_digest, fingerprint
from stages.bridges.stores import open_store
from stages.capture.adopted import Adoption, adopted_spec, demand_claim
from stages.capture.code import code_digest
from stages.capture.rows import FolderPlan, Row, plan_folders, read_rows
from stages.capture.spill import capture_rows
from stages.capture.store import folder_bytes, write_folder
from stages.capture.work import WorkCache
from stages.contracts.adoption import ADOPTION
from stages.contracts.errors import ParamsError, Refusal, run
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    HIDDEN_STATES,
    PREPARED_MANIFEST,
    WORK,
    CapturedFolder,
    CaptureManifest,
    CaptureSpec,
    FolderConfig,
    PreparedManifest,
    TargetIdentity,
)
from stages.contracts.params import Params, load_params
from stages.contracts.points import check_points
from stages.contracts.progress import progress
from stages.contracts.report import demand
from stages.targets import identify_target, load_target, locate_target

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

_SPARE_BYTES = 64 << 20  # configs, parquet and file system overhead beside the states


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
    )


def open_adoption(params: Params, spec: CaptureSpec, model_type: str, plans: Sequence[FolderPlan]) -> Adoption | None:
    """The store that capture.adopt names, matched with the prepared rows; None where none is named.

    Raises:
        LineError: no store, other points or norm than are needed, nothing that says which, or rows that it lacks.
    """
    capture = params.capture
    if capture.adopt is None:
        return None
    store = open_store(Path(capture.adopt))
    claim = demand_claim(store, spec, model_type, capture.adopt_layer_ids, capture.adopt_last_state)
    mark, extract_lacking = fingerprint(store), capture.adopt_lacking == "extract"
    adopted = adopted_spec(spec, store.kind, mark, bridge_digest(), extract_lacking=extract_lacking)
    adoption = Adoption(store, [row for plan in plans for row in plan.rows], claim, adopted, mark)
    print(f"extract: {adoption.words()}", file=sys.stderr, flush=True)
    if not extract_lacking:
        adoption.demand_all()
    return adoption


def demand_room(plans: Sequence[FolderPlan], cache: WorkCache, output: Path) -> int:
    """Print what is going to happen, and return the tokens of rows that stand in no finished folder.

    Raises:
        Refusal: the disk cannot hold what is to be written.
    """
    spec = cache.capture
    new = [plan for plan in plans if not cache.has(plan.row_ids)]
    todo = [row for plan in plans for row in cache.missing(plan)]
    sizes = [folder_bytes(len(p.rows), p.tokens, len(spec.points) + 1, spec.hidden_size) for p in plans]
    need = sum(size for plan, size in zip(plans, sizes, strict=True) if not cache.has(plan.row_ids))
    output.mkdir(parents=True, exist_ok=True)
    if output.stat().st_dev != cache.root.stat().st_dev:
        need += sum(sizes)  # no hard link from one file system to another: the folders are copied
    free = shutil.disk_usage(cache.root).free
    rows, tokens = sum(len(p.rows) for p in plans), sum(len(row) for row in todo)
    how = "are taken from the store" if spec.engine.startswith("adopted") else "go through the target"
    print(
        f"extract: {rows} rows, {sum(p.tokens for p in plans)} tokens, {sum(sizes) / 1e9:.2f} GB in {len(plans)} folders; "
        f"{len(plans) - len(new)} folders stand in the work cache, {len(todo)} rows ({tokens} tokens) {how}; "
        f"{need / 1e9:.2f} GB to write, {free / 1e9:.1f} GB free",
        file=sys.stderr,
        flush=True,
    )
    if need + _SPARE_BYTES > free:
        raise Refusal(
            "The hidden states do not fit on this disk",
            where=str(cache.root),
            expected=f"{(need + _SPARE_BYTES) / 1e9:.2f} GB free",
            got=f"{free / 1e9:.2f} GB",
            do="free some, lower prepare.sources' limits, or move .cache and data to a larger disk",
        )
    return tokens


def finish_folders(
    states_of: Callable[[list[Row]], Iterator[Tensor]], plans: Sequence[FolderPlan], cache: WorkCache, tokens: int
) -> None:
    """Make what the work cache lacks, folder by folder; each is whole when it appears there.

    Args:
        states_of: states bf16 [L, S, H] of rows, in order, from the target or an adopted store.
        tokens: how many of the rows' tokens stand in no finished folder, for the bar.
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
                missing = cache.missing(plan)
                states = cache.states(plan, counted(states_of(missing) if missing else iter(())))
                cache.note(write_folder(cache.path(plan.row_ids), plan, cache.capture, states))


def link_folders(plans: Sequence[FolderPlan], cache: WorkCache, output: Path) -> list[FolderConfig]:
    """Put every planned folder below `output` and remove what else is there; the manifest is not written yet."""
    (output / CAPTURE_MANIFEST.name).unlink(missing_ok=True)
    names = {plan.name for plan in plans}
    for strange in output.iterdir():
        if strange.name not in names:
            shutil.rmtree(strange) if strange.is_dir() else strange.unlink()
    return [cache.link(plan, output) for plan in plans]


def describe(prepared: PreparedManifest, capture: CaptureSpec, folders: Sequence[FolderConfig]) -> CaptureManifest:
    return CaptureManifest(
        prepared_digest=prepared.digest(),
        capture=capture,
        slots=(*(f"point {p}" for p in capture.points), f"point {capture.layers}, before the final norm"),
        folders=tuple(
            CapturedFolder(
                name=f.name,
                source=f.source,
                start=f.start,
                end=f.end,
                tokens=f.tokens,
                config_digest=f.digest(),
                rows_digest=f.rows_digest,
            )
            for f in folders
        ),
        rows=sum(len(f.row_ids) for f in folders),
        tokens=sum(f.tokens for f in folders),
    )


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.target.threads)
    prepared = PreparedManifest.read(PREPARED_MANIFEST)
    demand("extraction", prepared.digest())
    folder = locate_target(params.target.origin)
    demand_target(identify_target(folder, params.target.name), prepared.target, params)
    plans = list(plan_folders(read_rows(prepared), params.capture.rows_per_folder))
    spec = capture_spec(params, prepared.target)
    adoption = open_adoption(params, spec, prepared.target.model_type, plans)
    cache = WorkCache(adoption.spec if adoption else spec, WORK)
    tokens = demand_room(plans, cache, HIDDEN_STATES)

    @cache_once
    def target() -> Decoder:
        return load_target(folder, params.target.device, params.target.dtype).pack()

    def through_target(rows: list[Row]) -> Iterator[Tensor]:
        return capture_rows(target(), rows, spec.points, params.capture.tokens_per_batch) if rows else iter(())

    def states_of(rows: list[Row]) -> Iterator[Tensor]:
        return adoption.states(rows, through_target) if adoption else through_target(rows)

    finish_folders(states_of, plans, cache, tokens)
    folders = link_folders(plans, cache, HIDDEN_STATES)
    if adoption:
        adoption.record.write(ADOPTION)
    cache.drop_superseded(plans)
    describe(prepared, cache.capture, folders).write(CAPTURE_MANIFEST)


if __name__ == "__main__":
    run(main)
