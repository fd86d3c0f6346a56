"""extract over a real Ray cluster of two nodes: the bytes of one process, a worker killed in the midst, and what is not there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages import _extract_ray as scattered
from stages import extract
from stages.capture.work import WorkCache
from stages.contracts.errors import DataError, EngineError, ParamsError
from stages.contracts.manifest import CAPTURE_MANIFEST, HIDDEN_STATES, WORK
from stages.contracts.params import load_params
from tests import line, tiny
from tests.capture.conftest import bytes_of

SOURCES = (line.TinySource("code", "coding", 24), line.TinySource("talk", "general", 12))
REPO = Path(__file__).parents[1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    manifest = line.write_prepared(tmp_path, tiny.make_target(tmp_path / "target"), SOURCES)
    line.write_gate_report(tmp_path, "extraction", manifest.digest())
    line.write_params(tmp_path, tmp_path / "target")
    return tmp_path


def told(ray: str | None) -> None:
    line.write_params(Path.cwd(), Path("target").resolve(), {"capture": {"ray": ray}})


def extracted() -> dict[str, bytes]:
    return bytes_of(HIDDEN_STATES)


def forget() -> None:
    shutil.rmtree(HIDDEN_STATES)
    shutil.rmtree(WORK)


def run_extract() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stages.extract"],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes, each with a place for one worker."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        made.wait_for_nodes()
        assert made.address
        yield made.address
    finally:
        made.shutdown()


def kill_first_writer(killed: list[int], stop: threading.Event) -> None:
    """kill -9 of the first worker that is seen writing a folder."""
    while not stop.is_set() and not killed:
        for part in WORK.glob("*/.*.part"):
            pid = int(part.name.split(".")[-2])
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return
        time.sleep(0.001)


@pytest.mark.slow
def test_two_nodes_make_the_bytes_of_one_process_and_a_killed_worker_loses_and_doubles_no_row(
    here: Path, cluster: str
) -> None:
    extract.main()
    alone = extracted()
    forget()
    told(cluster)
    killed, stop = list[int](), threading.Event()
    killer = threading.Thread(target=kill_first_writer, args=(killed, stop))
    killer.start()
    done = run_extract()
    stop.set()
    killer.join()
    assert done.returncode == 0, done.stderr
    assert len(killed) == 1, "no worker was seen writing"
    assert extracted() == alone
    assert (
        not list(WORK.glob("*/.*.part")) or run_extract().returncode == 0
    )  # what the dead worker left is swept by the next
    assert not list(WORK.glob("*/.*.part"))
    again = run_extract()
    assert again.returncode == 0 and "Ray" not in again.stderr, "finished folders were made again"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "head:port"])
def test_a_clusters_absence_is_told_before_the_target_is_loaded(here: Path, address: str) -> None:
    told(address)
    plans, cache = planned()
    with pytest.raises(ParamsError, match="There is no Ray cluster to join") as refused:
        scattered.scatter(plans, cache, Path("no target is there"), load_params())
    assert address in refused.value.text() and "ray start --head" in refused.value.text()


def test_folders_that_reuse_rows_are_left_to_this_process(here: Path) -> None:
    plans, cache = planned()
    assert scattered.whole_plans(plans, cache) == plans
    make(plans[0], cache)
    assert scattered.whole_plans(plans, cache) == plans[1:]


def planned() -> tuple[list[scattered.FolderPlan], WorkCache]:
    from stages.capture.rows import plan_folders, read_rows
    from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest

    params, prepared = load_params(), PreparedManifest.read(PREPARED_MANIFEST)
    plans = list(plan_folders(read_rows(prepared), params.capture.rows_per_folder))
    return plans, WorkCache(extract.capture_spec(params, prepared.target), WORK)


def make(plan: scattered.FolderPlan, cache: WorkCache) -> scattered.FolderConfig:
    """What a worker does, here."""
    capture = cache.capture.model_dump_json()
    how = scattered.Making(str(Path("target").resolve()), "cpu", "float32", 1, 256, capture)
    made = scattered.make_folder(how, plan, cache.cut(plan, 256), str(cache.path(plan.row_ids).resolve()))
    config = scattered.FolderConfig.model_validate_json(made)
    scattered.take_in(plan, config, cache)
    return config


def test_a_workers_folder_is_what_extract_makes(here: Path) -> None:
    plans, cache = planned()
    for plan in plans:
        make(plan, cache)
    extract.main()
    by_workers = extracted()
    forget()
    extract.main()
    assert extracted() == by_workers and (HIDDEN_STATES / CAPTURE_MANIFEST.name).exists()


def test_a_folder_that_is_not_on_this_disk_or_has_other_bytes_is_refused(here: Path) -> None:
    plans, cache = planned()
    config = make(plans[0], cache)
    with pytest.raises(EngineError, match="not here"):
        scattered.take_in(plans[1], config, cache)
    rows = cache.path(plans[0].row_ids) / "rows.safetensors"
    told_bytes = bytearray(rows.read_bytes())
    told_bytes[-1] ^= 1
    rows.chmod(0o644)
    rows.write_bytes(told_bytes)
    with pytest.raises(DataError):
        scattered.take_in(plans[0], config, cache)


@pytest.mark.parametrize("change", [{"engine": "sglang"}, {"adopt": "theirs"}])
def test_ray_with_what_it_cannot_spread_is_refused(here: Path, change: dict[str, str]) -> None:
    line.write_params(here, here / "target", {"capture": {"ray": "local"} | change})
    with pytest.raises(ParamsError, match="ray spreads the target's own passes"):
        load_params()
