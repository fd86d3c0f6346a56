"""Runs killed -9 at random moments under a real Prefect server, worker and S3 server: the process of the flow, and the worker.

Eight moments for the flow and three for the worker; with the 21 uploads and 8 kills of the S3 server in test_registry_s3.py that is 40,
each drawn from a seeded generator over the time that a whole run takes.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import line, release
from tests.flows.s3 import BUCKET, KEYS, S3Server
from tests.flows.samples import write_draft, write_registry
from tests.flows.test_prefect import Server, make_clone, prefect_server, wait_for
from tests.flows.test_registry_s3 import records_are_whole, stands

pytestmark = pytest.mark.slow
_QUICK = {
    # the least that Prefect takes: a run whose worker was killed before it began gives its slot back after so long, not 300 s
    "PREFECT_SERVER_CONCURRENCY_INITIAL_DEPLOYMENT_LEASE_DURATION": "30",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("kills")
    s3 = S3Server(home / "s3" / "data")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (KEYS | {"AWS_EC2_METADATA_DISABLED": "true"}).items():
            patch.setenv(name, value)
        s3.start()
        try:
            repo = make_clone(home / "clone", repo_root)
            write_registry(repo, uri=f"s3://{BUCKET}/kills", endpoint_url=s3.url)
            params = repo / "params.yaml"  # drafts of a few bytes cannot be measured beside each other
            params.write_text(params.read_text().replace("production_beside: if_measured", "production_beside: ignore"))
            (repo / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n")
            with prefect_server(home, repo, KEYS | _QUICK) as it:
                yield it
        finally:
            s3.kill()


def _process_of(run: str) -> int | None:
    """The process that Prefect's worker started for this run."""
    wanted = f"PREFECT__FLOW_RUN_ID={run}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, told = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ProcessLookupError):
            continue
        if wanted in told and b"prefect" in words:
            return int(folder.name)
    return None


def _started(it: Server, run: str) -> int:
    found: list[int] = []

    def ready() -> bool:
        pid = _process_of(run)
        found.extend([pid] if pid else [])
        return bool(found)

    wait_for(ready, "the process of the run", it.worker_log)
    return found[0]


def _whole_run(it: Server, deployment: str) -> float:
    """Seconds that a run takes from the start of its process; it succeeds."""
    run = it.start(deployment)
    _started(it, run)
    began = time.monotonic()
    state = it.end_of(run)
    assert state["type"] == "COMPLETED", state
    return time.monotonic() - began


def _new_draft(it: Server, seed: int) -> str:
    """Another draft that passed, by the name of the release it would make; of several pieces."""
    lock = (it.repo / "dvc.lock").read_bytes()
    write_draft(it.repo, random.Random(seed).randbytes(3 << 20))
    (it.repo / "dvc.lock").write_bytes(lock)
    return release.record_of(it.repo, release.contents(it.repo)).name


def _nothing_is_lost(it: Server, allowed: set[str]) -> str:
    records_are_whole(it.repo)
    return stands(it.repo, allowed)


@pytest.mark.parametrize(("deployment", "seed"), [("promote/promote", 21), ("retrain/weekly", 22)])
def test_the_process_of_a_flow_killed_at_random_moments(service: Server, deployment: str, seed: int) -> None:
    rng, it = random.Random(seed), service
    _new_draft(it, seed)
    takes = _whole_run(it, deployment)
    production, killed = str(release.current(it.repo)), 0
    for round_ in range(2):
        (it.repo / "train.sh").write_text(f"echo trained {seed} {round_}\n")
        _new_draft(it, 10 * seed + round_)
        moves = len(release.ledger(it.repo))
        for _ in range(2):
            run = it.start(deployment)
            process = _started(it, run)
            time.sleep(rng.uniform(0, takes))
            try:
                os.kill(process, signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                pass  # it had ended
            assert it.end_of(run)["type"] in ("CRASHED", "COMPLETED"), "the worker tells what became of it"
            _nothing_is_lost(it, {production, _promised(it)})
        _whole_run(it, deployment)
        production = _nothing_is_lost(it, {_promised(it)})
        assert len(release.ledger(it.repo)) == moves + 1, "promoted once, however often it was tried"
        assert line.holders(it.repo) == []
    print(f"{deployment}: {killed} of 4 killed before their end; a whole run takes {takes:.1f} s")


def _promised(it: Server) -> str:
    """The release that the draft here makes, with the dvc.lock of now."""
    return release.record_of(it.repo, release.contents(it.repo)).name


def test_a_worker_killed_at_random_moments_is_recovered_from_by_the_next_run(service: Server) -> None:
    rng, it = random.Random(31), service
    _new_draft(it, 31)
    takes = _whole_run(it, "promote/promote")
    production, ends = str(release.current(it.repo)), list[str]()
    for i in range(3):
        new = _new_draft(it, 310 + i)
        run = it.start("promote/promote")
        time.sleep(rng.uniform(0, takes + 2))
        assert it.worker is not None
        os.kill(it.worker.pid, signal.SIGKILL)
        it.worker.wait()
        _nothing_is_lost(it, {production, new})
        it.start_worker()
        _whole_run(it, "promote/promote")
        production = _nothing_is_lost(it, {new})
        ends.append(it.ask(f"/flow_runs/{run}")["state"]["type"])
    assert len(ends) == 3 and line.holders(it.repo) == []
    print(f"runs whose worker was killed ended as {', '.join(ends)}")
