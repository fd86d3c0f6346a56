"""Extraction over many GPUs or nodes: a Ray task a row folder, on a cluster whose nodes share this folder.

A task is what one process does for a folder: the target over its rows, written aside and renamed, so a folder is there whole or not
at all, and a task that died with its worker is run again by Ray. Only this process opens the work cache (what it sweeps away of dead
writers it tells by process ids, and those of other nodes are not its own); it checks the bytes of what a worker wrote before it takes them
in. Folders that reuse rows of finished ones need the cache and are left to `finish_folders`.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from functools import cache as cache_once
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.capture import finishing
from stages.capture.rows import FolderPlan, Row
from stages.capture.spill import capture_rows
from stages.capture.store import RowFolder
from stages.capture.work import WorkCache
from stages.capture.writing import write_folder
from stages.contracts.errors import EngineError, ParamsError
from stages.contracts.manifest import CaptureSpec, FolderConfig
from stages.contracts.params import Params
from stages.contracts.progress import progress
from stages.targets import load_target

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

RETRIES = 3  # of a task whose worker or node died
_REACH_S = 10.0  # for the cluster's head to answer
_AT_ONCE = 256  # tasks handed over and not yet done: their rows lie in Ray's memory


class Making(NamedTuple):
    """What a task needs beside the folder."""

    target: str
    device: str
    dtype: str
    threads: int
    tokens_per_batch: int
    capture: str  # CaptureSpec as JSON


@cache_once
def _target(folder: str, device: str, dtype: str) -> Decoder:
    return load_target(Path(folder), device, dtype).pack()


def make_folder(how: Making, plan: FolderPlan, groups: Sequence[Sequence[Row]], path: str) -> str:
    """Run the target over the rows of `plan` and write the folder `path`; its config as JSON. Runs in a Ray worker."""
    import torch

    torch.set_num_threads(how.threads)
    spec = CaptureSpec.model_validate_json(how.capture)
    target = _target(how.target, how.device, how.dtype)
    states = capture_rows(target, list(plan.rows), spec.points, how.tokens_per_batch)
    return write_folder(Path(path), plan, spec, states, groups).model_dump_json()


def whole_plans(plans: Sequence[FolderPlan], cache: WorkCache) -> list[FolderPlan]:
    """Those of which no row stands anywhere yet; of plans with the same rows the first."""
    lacking = {cache.key(p.row_ids): p for p in reversed(plans) if len(cache.missing(p)) == len(p.rows)}
    return [p for p in plans if lacking.get(cache.key(p.row_ids)) is p]


def connect(params: Params) -> Any:
    """The ray module, joined with the cluster that capture.ray names.

    Raises:
        ParamsError: ray is not installed, or there is no such cluster.
    """
    where = "params.yaml: capture.ray"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import: nothing is reported to anyone
    try:
        import ray
    except ImportError as error:
        raise ParamsError(
            "Ray is not installed", where=where, expected="null, or the package ray", do="pip install '.[ray]'"
        ) from error
    words: dict[str, Any] = {"address": params.capture.ray}
    if params.capture.ray == "local":
        places = max((os.cpu_count() or 1) // params.target.threads, 1)
        words = {"num_cpus": places * params.target.threads, "include_dashboard": False}
        words["_node_ip_address"] = "127.0.0.1"
    try:
        _reach(params.capture.ray)
        ray.init(
            **words,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}},
        )
    except (OSError, ValueError) as error:
        raise ParamsError(
            "There is no Ray cluster to join",
            where=where,
            expected="`local`, `auto` for one that runs on this machine, or HOST:PORT of its head",
            got=f"{params.capture.ray}: {str(error).splitlines()[0]}",
            do="ray start --head on one node, ray start --address HOST:PORT on the others",
        ) from error
    return ray


def _reach(address: str | None) -> None:
    """Raises OSError or ValueError when nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and "//" not in host:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()


def scatter(plans: Sequence[FolderPlan], cache: WorkCache, target: Path, params: Params) -> int:
    """Make the folders of `plans` that are wholly lacking, many at once; how many there were.

    Raises:
        ParamsError: see `connect`.
        EngineError: a task's worker died again and again.
        LineError: a task's own.
    """
    todo = whole_plans(plans, cache)
    if not todo:
        return 0
    told = params.target
    how = Making(
        target=str(target.resolve()),
        device=told.device,
        dtype=told.dtype,
        threads=told.threads,
        tokens_per_batch=params.capture.tokens_per_batch,
        capture=cache.capture.model_dump_json(),
    )
    ray = connect(params)
    try:
        with progress(sum(p.tokens for p in todo), "extract: Ray", "tokens") as advance:
            for plan, config in _made(ray, how, todo, cache):
                take_in(plan, config, cache)
                advance(plan.tokens, f"{len(ray.nodes())} nodes")
    finally:
        ray.shutdown()
    return len(todo)


def _made(
    ray: Any, how: Making, todo: Sequence[FolderPlan], cache: WorkCache
) -> Iterator[tuple[FolderPlan, FolderConfig]]:
    """Each plan with its folder's config, in the order they are done."""
    gpus = 1 if how.device.startswith("cuda") else 0
    task = ray.remote(num_cpus=how.threads, num_gpus=gpus, max_retries=RETRIES)(make_folder)
    waiting, running = iter(todo), dict[Any, FolderPlan]()
    while True:
        for plan in islice(waiting, _AT_ONCE - len(running)):
            groups = cache.cut(plan, how.tokens_per_batch)
            path = str(cache.path(plan.row_ids).resolve())
            running[task.remote(how, plan, groups, path)] = plan
        if not running:
            return
        (done,), _ = ray.wait(list(running), num_returns=1)
        plan = running.pop(done)
        yield plan, FolderConfig.model_validate_json(_answer(ray, done, plan))


def _answer(ray: Any, done: Any, plan: FolderPlan) -> str:
    try:
        return ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error  # what the stage's own code said, as without Ray
    except ray.exceptions.RayError as error:
        raise EngineError(
            "A Ray task was lost and could not be run again",
            where=plan.name,
            expected=f"its folder, in {1 + RETRIES} tries",
            got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            do="look for out-of-memory on the nodes (`ray logs`), lower capture.tokens_per_batch; folders that are done are kept: repro goes on",
        ) from error


def take_in(plan: FolderPlan, config: FolderConfig, cache: WorkCache) -> None:
    """Note a worker's folder once its bytes, read here, are those of its config.

    Raises:
        DataError: they are not.
        EngineError: it is not on this machine's disk.
    """
    path = cache.path(plan.row_ids)
    if not path.is_dir():
        raise EngineError(
            "A Ray worker's folder is not here",
            where=str(path),
            expected="nodes that share this clone's folder, at the same path",
            got="a folder on that node's own disk",
            do="mount the clone on every node, or set capture.ray to null",
        )
    folder = RowFolder(path)
    folder.verify()
    finishing.take_in(plan, config, cache)
