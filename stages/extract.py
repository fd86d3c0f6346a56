"""extract: the target's residual stream at three points and the last state, for every prepared row."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from stages.capture.code import code_digest
from stages.capture.dialects import layer_ids
from stages.capture.rows import FolderPlan, Row, plan_folders, read_rows
from stages.capture.served import capture_served
from stages.capture.spill import capture_rows
from stages.capture.store import folder_bytes, write_folder
from stages.capture.work import WorkCache
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
from stages.engines.sglang import DIALECT, VERSION, Launch, serve
from stages.targets import identify_target, load_target, locate_target

Compute = Callable[[Sequence[Row]], Iterator[Tensor]]
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
        code_digest=code_digest(target.model_type, engine=params.capture.engine),
        points=check_points(params.capture.points, target.layers),
        layers=target.layers,
        hidden_size=target.hidden_size,
        compute_dtype=params.target.dtype,
        engine=f"sglang {VERSION}" if params.capture.engine == "sglang" else "in_process",
    )


def demand_room(plans: Sequence[FolderPlan], cache: WorkCache, output: Path) -> int:
    """Print what is going to happen, and return the tokens that go through the target.

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
    print(
        f"extract: {rows} rows, {sum(p.tokens for p in plans)} tokens, {sum(sizes) / 1e9:.2f} GB in {len(plans)} folders; "
        f"{len(plans) - len(new)} folders stand in the work cache, {len(todo)} rows ({tokens} tokens) go through the target; "
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


@contextmanager
def capturing(
    params: Params, folder: Path, plans: Sequence[FolderPlan], cache: WorkCache
) -> Generator[Compute, None, None]:
    """What puts rows through the target: here, or by a server that is ended afterwards; see capture/served.py."""
    told, points = params.capture, cache.capture.points
    target = load_target(folder, params.target.device, params.target.dtype).pack()
    if told.engine == "in_process":
        yield lambda rows: capture_rows(target, rows, points, told.tokens_per_batch)
        return
    config = json.loads((folder / "config.json").read_text())
    launch = Launch(
        target=folder,
        device=params.target.device,
        dtype=params.target.dtype,
        threads=params.target.threads,
        concurrency=params.serve.concurrency,
        positions=1 + max(len(row) for plan in plans for row in plan.rows),  # SGLang decodes at least one token
        capture_ids=layer_ids(points, DIALECT, config["model_type"]),
    )
    with serve(launch, params.serve.sglang, label="capture") as server:
        yield lambda rows: capture_served(
            target, rows, points, told.tokens_per_batch, lambda ids: server.states(ids)[0], launch.concurrency
        )


def finish_folders(compute: Compute | None, plans: Sequence[FolderPlan], cache: WorkCache, tokens: int) -> None:
    """Make what the work cache lacks, folder by folder; each is whole when it appears there.

    Args:
        compute: gives the states of rows, in order; None when every row stands somewhere in the cache, and folders are only
            put together anew.
        tokens: how many go through the target, for the bar.
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
                computed: Iterator[Tensor] = iter(())
                if (missing := cache.missing(plan)) and compute is not None:
                    computed = compute(missing)
                states = cache.states(plan, counted(computed))
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
    cache = WorkCache(capture_spec(params, prepared.target), WORK)
    tokens = demand_room(plans, cache, HIDDEN_STATES)
    with capturing(params, folder, plans, cache) if tokens else nullcontext() as compute:
        finish_folders(compute, plans, cache, tokens)
    folders = link_folders(plans, cache, HIDDEN_STATES)
    cache.drop_superseded(plans)
    describe(prepared, cache.capture, folders).write(CAPTURE_MANIFEST)


if __name__ == "__main__":
    run(main)
