"""The registry on a real S3 server: races, kills, faults on the way, and what a person is told."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import release
from flows.registry import parcels, s3_upload
from flows.registry.s3 import S3Store
from flows.registry.store import StoreError, open_store
from stages.contracts.errors import DataError
from stages.contracts.files import digest
from stages.contracts.params import load_registry
from stages.contracts.release import ReleaseRecord, current
from tests.flows.s3 import BUCKET, KEYS, FaultProxy, S3Server
from tests.flows.samples import write_draft, write_registry
from tests.flows.test_registry import conforms, demand_one_winner

pytestmark = pytest.mark.slow
_LARGE = 3 * s3_upload.PART_BYTES + 12345


@pytest.fixture(scope="module", autouse=True)
def _keys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", "nowhere")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "nowhere")
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3") / "data")
    running.start()
    try:
        yield running
    finally:
        running.kill()


def clone_of(url: str, root: Path, prefix: str, **changes: object) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    write_registry(root, uri=f"s3://{BUCKET}/{prefix}", endpoint_url=url, **changes)
    return root


def large(seed: int) -> bytes:
    return random.Random(seed).randbytes(_LARGE)


def test_s3_is_a_store(server: S3Server, tmp_path: Path) -> None:
    root = clone_of(server.url, tmp_path / "clone", "conforms")
    conforms(open_store(load_registry(root / "params.yaml"), root), tmp_path)


def test_of_twenty_promotions_at_once_to_s3_exactly_one_wins(server: S3Server, tmp_path: Path) -> None:
    clones = [clone_of(server.url, tmp_path / f"clone {i}", "twenty", timeout_s=60) for i in range(20)]
    for i, clone in enumerate(clones):
        write_draft(clone, b"draft %d" % i)
    demand_one_winner(clones)


def test_a_killed_upload_is_gone_on_with_behind_its_finished_parts(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = clone_of(server.url, tmp_path / "clone", "resumed")
    path = tmp_path / "weights"
    path.write_bytes(large(1))
    key = "blobs/" + digest(path.read_bytes()).removeprefix("sha256:")
    store = open_store(load_registry(root / "params.yaml"), root)
    assert isinstance(store, S3Store)
    sent: list[int] = []
    upload_part = store._client.upload_part

    def counted(**words: object) -> object:
        number = words["PartNumber"]
        assert isinstance(number, int)
        if not sent and number == 3:
            raise KeyboardInterrupt
        told = upload_part(**words)
        sent.extend([number] if number == 3 or sent else [])
        return told

    monkeypatch.setattr(store._client, "upload_part", counted)
    with pytest.raises(KeyboardInterrupt):
        store.put_file(key, path)
    assert store.look(key) is None, "nothing of it is visible"
    sent.append(0)
    store.put_file(key, path)
    assert sent == [0, 3, 4]
    assert b"".join(store.stream(key)) == path.read_bytes()


def test_parts_of_an_abandoned_upload_are_swept_after_the_grace(server: S3Server, tmp_path: Path) -> None:
    root = clone_of(server.url, tmp_path / "clone", "swept", grace_hours=1e-6)
    write_draft(root)
    release.promote(root)
    store = open_store(load_registry(root / "params.yaml"), root)
    assert isinstance(store, S3Store)
    store._client.create_multipart_upload(Bucket=BUCKET, Key="swept/blobs/abandoned")
    time.sleep(1.1)
    assert "swept/blobs/abandoned" in release.prune(root, delete=True)
    assert release.prune(root, delete=True).startswith("kept: ")


def stands(root: Path, allowed: set[str]) -> str:
    """What is production, once every file of it is known to be whole; it is one of the `allowed`."""
    to = root.parent / f"fetched {time.monotonic_ns()}"
    found = release.fetch(root, "production", to)
    assert found.name in allowed and parcels.altered(to, found.record) == []
    release.list_releases(root)
    return found.name


def records_are_whole(root: Path) -> None:
    store = open_store(load_registry(root / "params.yaml"), root)
    for listed in store.listing("records/"):
        found = store.read(listed.key)
        assert found is not None
        record = ReleaseRecord.model_validate_json(found.data)
        assert parcels.missing(store, record) == [], "a record never names what is not there"


def _promote_quietly(root: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    release.promote(root)


def _promoting(root: Path) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_promote_quietly, args=(root,))
    process.start()
    return process


def test_uploads_killed_at_random_moments_lose_nothing_and_show_nothing_half(server: S3Server, tmp_path: Path) -> None:
    root = clone_of(server.url, tmp_path / "clone", "killed")
    rng = random.Random(7)
    write_draft(root, b"first")
    production = release.promote(root).name
    killed = 0
    for round_ in range(7):
        write_draft(root, large(100 + round_))
        new = release.record_of(root, release.contents(root)).name
        for _ in range(3):
            process = _promoting(root)
            time.sleep(rng.uniform(0.02, 2.5))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed += process.exitcode == -signal.SIGKILL
            stands(root, {production, new})
            records_are_whole(root)
        assert release.promote(root).name == new
        production = stands(root, {new})
    assert len(release.ledger(root)) == 8, "every promotion once"
    print(f"{killed} of 21 killed before their end")


def test_a_server_killed_at_random_moments_loses_nothing_and_the_next_run_succeeds(tmp_path: Path) -> None:
    server = S3Server(tmp_path / "data")
    server.start()
    rng = random.Random(11)
    failed = 0
    try:
        root = clone_of(server.url, tmp_path / "clone", "crash", timeout_s=5, retries=2)
        write_draft(root, b"first")
        production = release.promote(root).name
        for round_ in range(8):
            write_draft(root, large(200 + round_))
            new = release.record_of(root, release.contents(root)).name
            process = _promoting(root)
            time.sleep(rng.uniform(0.02, 2.0))
            server.kill()
            process.join(120)
            failed += process.exitcode != 0
            server.start()
            stands(root, {production, new})
            records_are_whole(root)
            release.follow(root)
            assert release.promote(root).name == new
            production = stands(root, {new})
        assert len(release.ledger(root)) == 9
    finally:
        server.kill()
    print(f"{failed} of 8 promotions failed with their server")


@pytest.mark.parametrize("fault", ["slow", "fail", "cut", "flip", "flip-up"])
def test_a_way_to_s3_with_faults_is_survived(server: S3Server, tmp_path: Path, fault: str) -> None:
    with FaultProxy(server.ports[0], (fault,), every=4) as proxy:
        root = clone_of(proxy.url, tmp_path / "clone", f"faults-{fault}", retries=8)
        names = []
        for weights in (large(1)[: 9 << 20], b"b"):
            write_draft(root, weights)
            names.append(release.promote(root).name)
        assert release.rollback(root).name == names[0]
        assert release.fetch(root, names[1], tmp_path / "to").name == names[1]
        assert proxy.done[fault] > 5
    direct = clone_of(server.url, tmp_path / "direct", f"faults-{fault}")
    assert stands(direct, {names[0]}) == names[0]
    assert release.follow(direct) is not None and len(release.ledger(direct)) == 3


def test_a_rollback_works_while_s3_answers_slowly(server: S3Server, tmp_path: Path) -> None:
    root = clone_of(server.url, tmp_path / "clone", "slowly")
    names = []
    for weights in (b"a", b"b"):
        write_draft(root, weights)
        names.append(release.promote(root).name)
    with FaultProxy(server.ports[0], ("slow",), every=1, wait_s=0.05) as proxy:
        fresh = clone_of(proxy.url, tmp_path / "fresh", "slowly")
        began = time.monotonic()
        assert release.rollback(fresh).name == names[0] == current(fresh)
    print(f"rollback from a fresh clone, every answer spread over a second: {time.monotonic() - began:.1f} s")


def test_a_way_that_always_flips_a_byte_is_told_and_nothing_is_promoted(server: S3Server, tmp_path: Path) -> None:
    clean = clone_of(server.url, tmp_path / "clean", "flipped")
    write_draft(clean, b"a" * 1000)
    name = release.promote(clean).name
    with FaultProxy(server.ports[0], ("flip",), every=1) as proxy:
        root = clone_of(proxy.url, tmp_path / "clone", "flipped", retries=1)
        with pytest.raises((DataError, StoreError)) as told:
            release.fetch(root, name, tmp_path / "to")
    assert "record was altered" in told.value.text() or "other bytes than S3 has" in told.value.text()
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "S3 refuses this secret key"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "S3 does not know this access key"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "No credentials for S3 in the environment"),
        ({"AWS_PROFILE": "nobody"}, "AWS_PROFILE names no profile"),
    ],
)
def test_wrong_credentials_are_told_and_never_shown(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str | None], words: str
) -> None:
    for name, value in keys.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    root = clone_of(server.url, tmp_path / "clone", "keys")
    write_draft(root)
    with pytest.raises(StoreError, match=words) as told:
        release.promote(root)
    assert "set AWS_ACCESS_KEY_ID" in told.value.do and current(root) is None
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in told.value.text() and "wrong" not in told.value.text()


def test_a_missing_bucket_and_a_missing_server_are_told(server: S3Server, tmp_path: Path) -> None:
    root = clone_of(server.url, tmp_path / "clone", "x")
    write_registry(root, uri="s3://nowhere/x")
    write_draft(root)
    with pytest.raises(StoreError, match=r"The bucket is not there\n  where: s3://nowhere/x(.|\n)*registry.uri"):
        release.promote(root)
    write_registry(root, endpoint_url="http://127.0.0.1:9", retries=1)
    with pytest.raises(StoreError, match=r"S3 is not reached(.|\n)*registry.endpoint_url"):
        release.list_releases(root)


def test_the_command_line_tells_a_fault_of_s3_without_a_traceback(
    server: S3Server, tmp_path: Path, repo_root: Path
) -> None:
    root = clone_of(server.url, tmp_path / "clone", "x")
    write_registry(root, uri="s3://nowhere/x")
    (root / "dvc.yaml").touch()
    done = subprocess.run(
        [sys.executable, "-m", "flows.release", "rollback"], cwd=root, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(repo_root)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: The bucket is not there\n")


def test_a_full_disk_here_is_told_and_the_release_before_stays(server: S3Server, tmp_path: Path) -> None:
    """The clone stands on a file system of 4 MiB, where this user may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a small file system here")
    try:
        clone = clone_of(server.url, tmp_path / "clone", "full")
        write_draft(clone, b"a")
        first = release.promote(clone).name
        full = clone_of(server.url, small / "clone", "full")
        assert release.follow(full) is not None
        write_draft(clone, os.urandom(6 << 20))
        second = release.promote(clone).name
        with pytest.raises(OSError, match="No space left on device"):
            release.follow(full)
        assert (
            current(full) == first
            and parcels.altered(
                full / "releases" / first, ReleaseRecord.read(full / "releases" / first / "release.json")
            )
            == []
        )
        assert not (full / "releases" / second).exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_data_and_the_run_cache_go_to_s3_and_come_back_with_dvc_alone(server: S3Server, tmp_path: Path) -> None:
    from tests.flows.samples import make_repo

    graph = "stages:\n  make: {cmd: 'date +%N > rows.txt', params: [a], outs: [rows.txt]}\n"

    def dvc(root: Path, *words: str) -> None:
        done = subprocess.run([sys.executable, "-m", "dvc", *words], cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    one, other = make_repo(tmp_path / "one", graph), make_repo(tmp_path / "other", graph)
    for root in (one, other):
        dvc(root, "remote", "add", "-d", "store", "s3://dvc/line")
        dvc(root, "remote", "modify", "store", "endpointurl", server.url)
    dvc(one, "repro")
    dvc(one, "push", "--run-cache")
    dvc(other, "fetch", "--run-cache")
    dvc(other, "repro", "--pull")
    assert (other / "rows.txt").read_bytes() == (one / "rows.txt").read_bytes(), "not run a second time"


def test_a_file_of_the_size_of_one_part_and_one_byte_more_come_back(server: S3Server, tmp_path: Path) -> None:
    root = clone_of(server.url, tmp_path / "clone", "edges")
    store = open_store(load_registry(root / "params.yaml"), root)
    for size in (0, s3_upload.PART_BYTES, s3_upload.PART_BYTES + 1):
        path = tmp_path / "file"
        path.write_bytes(random.Random(size).randbytes(size))
        file = digest(path.read_bytes())
        from flows.registry.blobs import get_blob, put_blob

        put_blob(store, path, file, 3600)
        get_blob(store, file, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == path.read_bytes()
