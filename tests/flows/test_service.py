"""The line as a service, start to end: a real Prefect server on SQLite and on PostgreSQL, a real worker, a real S3 server.

The stages put in place what the real stages made beforehand of a tiny target with the same parameters, so that every digest is
true and the audit has something to find sound; what a flow starts by itself (the measurement beside production) runs for real.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from flows import release
from stages import benchmark, serve_validate
from stages.contracts.beside import BESIDE, BesideProduction
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.report import evidence_digests, report_path
from tests.flows import audited
from tests.flows.postgres import Cluster, postgres
from tests.flows.s3 import BUCKET, KEYS, S3Server
from tests.flows.samples import gate_report, git
from tests.flows.test_prefect import Server, copy_code, prefect_server
from tests.flows.test_release_flows import answer, paused

pytestmark = pytest.mark.slow
_RATES = (0.0015, 0.002)  # the learning rate tells which of the two drafts is meant
_TAKE = '''"""Puts in place what the real stages made with these parameters."""
import shutil, sys
from pathlib import Path
import yaml
made = Path("{made}") / str(yaml.safe_load(Path("params.yaml").read_text())["train"]["learning_rate"])
for name in sys.argv[1:]:
    if (made / name).is_dir():
        shutil.rmtree(name, ignore_errors=True)
        shutil.copytree(made / name, name)
    else:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made / name, name)
'''
_GRAPH = """stages:
  prepare:
    cmd: python take.py data/prepared reports/gates/extraction.json
    deps: [take.py]
    params: [target, prepare]
    outs: [data/prepared: {persist: true}]
  extract:
    cmd: python take.py data/hidden_states data/merged reports/gates/training.json
    deps: [take.py, data/prepared]
    params: [target, capture, merge]
    outs: [data/hidden_states: {persist: true}, data/merged: {persist: true}]
  train:
    cmd: python take.py models/draft reports/train.json
    deps: [take.py, data/merged]
    params: [target, train]
    outs: [models/draft: {persist: true}]
  gate-deployment:
    cmd: python take.py reports/serve_validate.json reports/benchmark.json reports/policy.json reports/gates/deployment.json
    deps: [take.py, models/draft]
    outs: [reports/gates/deployment.json: {cache: false}]
"""


def _make(root: Path, made: Path, rate: float) -> None:
    """All that the line makes with this learning rate, for real; gate-deployment's word is a sample."""
    serve = {"prompts_per_source": 3, "max_new_tokens": 8, "sampling_prompts": 0, "draft_steps": 2}
    bench = {"concurrencies": [1, 2], "draft_steps": [1, 2], "requests": 2, "max_new_tokens": 6, "repeats": 3}
    audited.run_line(root, learning_rate=rate, start_from="current_release")
    path = root / "params.yaml"
    told = yaml.safe_load(path.read_text())
    told["serve"] |= serve
    told["benchmark"] |= bench
    told["promotion"]["production_beside"] = "require"
    path.write_text(yaml.safe_dump(told, sort_keys=False))
    with audited.standing_in(root):
        serve_validate.main()
        benchmark.main()
        draft = DraftRecord.read(DRAFT / DRAFT_RECORD)
        judged = {"evidence": evidence_digests(Path())}
        gate_report("deployment", draft.digest()).model_copy(update=judged).write(report_path("deployment"))
    for part in ("data", "models", "reports"):
        shutil.copytree(root / part, made / str(rate) / part)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny target, params.yaml, and made/<learning rate>/ of both drafts."""
    root = tmp_path_factory.mktemp("line")
    audited.begin(root)
    for rate in reversed(_RATES):
        _make(root, root / "made", rate)
    return root


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3") / "data")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (KEYS | {"AWS_EC2_METADATA_DISABLED": "true"}).items():
            patch.setenv(name, value)
        running.start()
        try:
            yield running
        finally:
            running.kill()


def _clone(line: Path, repo: Path, repo_root: Path, url: str, prefix: str) -> Path:
    repo.mkdir(parents=True)
    git(repo, "init", "-q")
    audited.dvc(repo, "init", "-q")
    (repo / "dvc.yaml").write_text(_GRAPH)
    (repo / "take.py").write_text(_TAKE.format(made=line / "made"))
    (repo / ".gitignore").write_text("/data/\n/models/\n/releases/\n/.cache/\n/logs/\n/target/\n__pycache__/\n")
    shutil.copytree(line / "target", repo / "target")
    copy_code(repo_root, repo)
    told = yaml.safe_load((line / "params.yaml").read_text())
    told["registry"] |= {"uri": f"s3://{BUCKET}/{prefix}", "endpoint_url": url}
    (repo / "params.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "a clone")
    return repo


@pytest.fixture(params=["sqlite", "postgresql"])
def service(
    request: pytest.FixtureRequest, line: Path, s3: S3Server, tmp_path: Path, repo_root: Path
) -> Iterator[tuple[Server, Cluster | None]]:
    """A Prefect server with its worker on either database, and the database where it can be asked itself."""
    more = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2"} | KEYS
    repo = _clone(line, tmp_path / "clone", repo_root, s3.url, request.param)
    if request.param == "sqlite":
        with prefect_server(tmp_path, repo, more) as it:
            yield it, None
        return
    with postgres() as cluster:
        more["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = cluster.url
        with prefect_server(tmp_path, repo, more) as it:
            yield it, cluster


def _scheduled(it: Server, deployment: str) -> str:
    """A run that nobody ordered: a schedule that is due in some seconds, and the run which the server makes of it."""
    found = it.ask(f"/deployments/name/{deployment}")["id"]
    due = datetime.now(UTC) + timedelta(seconds=5)
    when = {"interval": 30 * 86400, "anchor_date": due.isoformat(), "timezone": "UTC"}
    it.ask(f"/deployments/{found}/schedules", [{"schedule": when, "active": True}])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        runs = it.ask(
            "/flow_runs/filter", {"deployments": {"id": {"any_": [found]}}, "sort": "EXPECTED_START_TIME_ASC"}
        )
        if runs and datetime.fromisoformat(runs[0]["expected_start_time"]) <= due + timedelta(seconds=1):
            assert runs[0]["auto_scheduled"]
            return str(runs[0]["id"])
        time.sleep(0.5)
    pytest.fail("the schedule made no run within a minute")


def test_schedule_retrain_promote_audit_second_retrain_promote_rollback(
    service: tuple[Server, Cluster | None],
) -> None:
    it, cluster = service
    repo = it.repo
    ended = it.end_of(_scheduled(it, "retrain/weekly"))
    assert ended["type"] == "COMPLETED", ended["message"]
    one = release.current(repo)
    assert ended["message"].startswith(f"Release {one}: accept length ")

    sound = it.end_of(it.start("audit/nightly"))
    assert (sound["type"], sound["message"]) == ("COMPLETED", "1 releases are sound"), sound["message"]

    again = it.end_of(it.start("retrain/weekly", overrides={"train.learning_rate": _RATES[1]}, promote=False))
    assert again["message"] == "The line is up to date; nothing was promoted.", again["message"]
    assert release.current(repo) == one
    run = it.start("promote/promote", approval=True)
    paused(it, run)
    answer(it, run, approve=True, by="Ada", words="")
    promoted = it.end_of(run)
    assert promoted["type"] == "COMPLETED" and "measured beside production" in promoted["message"], promoted["message"]
    two = release.current(repo)
    told = BesideProduction.read(repo / BESIDE)
    assert two != one and told.draft_digest == DraftRecord.read(repo / DRAFT / DRAFT_RECORD).digest()
    assert set(it.tasks_of(run)) == {"beside production", "propose", "accept"}

    shutil.rmtree(repo / "releases")  # days later, on a machine that never had them
    back = it.end_of(it.start("rollback/rollback", why="accept length fell"))
    assert back["type"] == "COMPLETED" and back["message"].startswith(f"Back to release {one}"), back["message"]
    assert [e["action"] for e in release.ledger(repo)] == ["promote", "promote", "rollback"]
    assert release.current(repo) == one
    if cluster is not None:
        assert cluster.ask("select count(*) from flow_run where state_type = 'COMPLETED'") == "5"
        assert cluster.ask("select version()").startswith("PostgreSQL")
