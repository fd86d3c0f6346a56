"""The audit's command in a fresh clone whose releases stand in a real S3 alone, and their data in a DVC remote."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from flows.registry.blobs import blob_key
from flows.registry.store import open_store
from stages.contracts.draft import DraftRecord
from stages.contracts.params import load_registry
from stages.contracts.release import ReleaseRecord
from tests import line
from tests.flows import audited
from tests.flows.s3 import BUCKET, KEYS, S3Server
from tests.flows.samples import git, write_registry

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
AWS = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "nowhere",
    "AWS_SHARED_CREDENTIALS_FILE": "nowhere",
}


@dataclass
class Fresh:
    """A clone with the commit, params.yaml's registry and the address of a DVC remote; no release, no data."""

    root: Path
    old: str
    new: str
    client: Any

    def cli(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"} | KEYS | AWS | environment
        command = [sys.executable, "-m", "flows.audit", *words]
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, check=False)

    def changed(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        """Write other bytes under a key, as S3 itself would take them from anyone with rights; gives those before."""
        body = self.client.get_object(Bucket=BUCKET, Key=f"audited/{key}")["Body"].read()
        self.client.put_object(Bucket=BUCKET, Key=f"audited/{key}", Body=change(body))
        return body


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two releases of a tiny line that really ran, promoted to S3; then the clone that made them is gone."""
    folder = tmp_path_factory.mktemp("audited")
    server = S3Server(folder / "data")
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (KEYS | AWS).items():
                patch.setenv(name, value)
            for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
                patch.delenv(name, raising=False)
            yield _made(folder, server)
    finally:
        server.kill()


def _made(folder: Path, server: S3Server) -> Fresh:
    made, root = folder / "made", folder / "fresh"
    made.mkdir()
    audited.begin(made)
    more = (audited.SOURCES[0], line.TinySource("tools", "agentic", 8))
    names: list[str] = []
    for changes in ({}, {"sources": more, "learning_rate": 0.002}):
        audited.run_line(made, **changes)
        write_registry(made, uri=f"s3://{BUCKET}/audited", endpoint_url=server.url)
        names.append(audited.promote(made))
    git(folder, "clone", "-q", str(made), str(root))
    shutil.move(made / ".dvc/cache", folder / "remote")
    shutil.rmtree(made)
    (root / ".dvc/config.local").write_text(f"['remote \"far\"']\n    url = {folder / 'remote'}\n")
    write_registry(root, uri=f"s3://{BUCKET}/audited", endpoint_url=server.url)
    client = boto3.Session().client(
        "s3", endpoint_url=server.url, region_name="us-east-1"
    )  # KEYS are in the environment
    return Fresh(root, names[0], names[1], client)


def test_a_fresh_clone_walks_a_release_of_s3_down_to_its_sources(fresh: Fresh) -> None:
    done = fresh.cli(fresh.old, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["registry"] == [] and [r["release"] for r in told["releases"]] == [fresh.old]
    things = {t["key"]: t for t in told["releases"][0]["things"]}
    unread = {key for key, thing in things.items() if thing["state"] != "verified"}
    assert unread == {"target", "tokenizer", "template"}, "the target's folder is not in the clone"
    assert [c["place"] for c in things["source:talk"]["copies"]] == ["remote"]
    assert things["draft/model.safetensors"]["copies"][0]["where"].startswith(f"s3://{BUCKET}/audited/blobs/")
    assert json.loads(fresh.cli("--json").stdout)["releases"][0]["release"] == fresh.new, "the production release"
    assert fresh.cli("--all").stdout.count("sound") == 2
    assert not (fresh.root / "releases").exists() and not (fresh.root / "data").exists()


def test_a_fresh_clone_answers_by_source_by_row_and_by_difference(fresh: Fresh, tmp_path: Path) -> None:
    told = fresh.cli("--source", "talk")
    assert told.returncode == 0 and told.stdout.startswith(f"{fresh.old}  draft sha256:"), told.stderr
    assert fresh.new not in told.stdout and "source talk: 7 (6 trained on" in told.stdout
    folders = json.loads(fresh.cli(fresh.new, "--json").stdout)["releases"][0]["folders"]
    row = next(f for f in folders if f["source"] == "tools")["row_ids"][0]
    assert [u["release"] for u in json.loads(fresh.cli("--row", row, "--json").stdout)] == [fresh.new]
    told = fresh.cli(fresh.old[:8], fresh.new)
    assert told.returncode == 0 and "params: train.learning_rate\n  - 0.0015\n  + 0.002" in told.stdout
    assert "source:tools\n  - (nothing)\n  + source tools" in told.stdout
    done = fresh.cli("--openlineage", str(tmp_path / "events.jsonl"))
    assert done.returncode == 0 and (tmp_path / "events.jsonl").read_text().count("\n") == 20


def _forged(body: bytes) -> bytes:
    """A draft's record in canonical bytes, valid in every field."""
    return DraftRecord.model_validate_json(body).model_copy(update={"steps_ahead": 9}).canonical()


def test_a_tampered_blob_of_s3_is_named_and_answers_do_not_follow_it(fresh: Fresh) -> None:
    record = ReleaseRecord.model_validate_json(fresh.changed(f"records/{fresh.new}.json", lambda body: body))
    key = blob_key(record.files["draft/draft_record.json"])
    good = fresh.changed(key, _forged)
    done, told = fresh.cli(fresh.new), fresh.cli("--source", "tools")
    untouched = fresh.cli("--json", fresh.old)
    fresh.changed(key, lambda _: good)
    assert done.returncode == 1 and f"where: s3://{BUCKET}/audited/{key}" in done.stdout
    assert "altered: the draft's record of the release is not what release names" in done.stdout
    assert told.returncode == 1 and "its sources cannot be told" in told.stdout
    found = json.loads(untouched.stdout)
    assert untouched.returncode == 1 and found["releases"][0]["sound"], "the registry is at fault, this release is not"
    assert [f["what"] for f in found["registry"]] == ["A file in the registry is not what its name says"]
    store = open_store(load_registry(fresh.root / "params.yaml"), fresh.root)
    store.delete(key)
    done = fresh.cli(fresh.new)
    fresh.client.put_object(Bucket=BUCKET, Key=f"audited/{key}", Body=good)
    assert done.returncode == 1 and "missing: The release does not hold the draft's record" in done.stdout


@pytest.mark.parametrize("words", [(), ("--source", "talk")])
def test_wrong_keys_and_a_missing_bucket_are_told_in_the_registrys_words(fresh: Fresh, words: tuple[str, ...]) -> None:
    done = fresh.cli(*words, AWS_SECRET_ACCESS_KEY="wrong-one")
    assert done.returncode == 2 and done.stderr.startswith("error: S3 refuses this secret key\n"), done.stderr
    assert "set AWS_ACCESS_KEY_ID" in done.stderr and "wrong-one" not in done.stderr
    uri = load_registry(fresh.root / "params.yaml").uri
    write_registry(fresh.root, uri="s3://nowhere/x")
    done = fresh.cli(*words)
    write_registry(fresh.root, uri=uri)
    assert done.returncode == 2 and done.stderr.startswith("error: The bucket is not there\n"), done.stderr
    assert "where: s3://nowhere/x" in done.stderr
