"""The flow under a real Prefect server and process worker, deployed from prefect.yaml, on a graph of shell stages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.flows.samples import ZERO, gate_report, git, make_repo, write_draft

pytestmark = pytest.mark.slow
_LIMIT_S = 150


@dataclass
class Server:
    """A Prefect server, a worker on the pool of prefect.yaml, and the clone that is deployed."""

    url: str
    env: dict[str, str]
    repo: Path
    worker_log: Path
    worker: subprocess.Popen[bytes] | None = None
    schedules: dict[str, list[str]] = field(default_factory=dict)  # of each deployment, as deployed: its active crons

    def start_worker(self) -> None:
        self.worker = _start(["worker", "start", "--pool", "draftline"], self.env, self.repo, self.worker_log)

    def cli(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *words], cwd=self.repo, env=self.env, capture_output=True, text=True,
            timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"prefect {' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def pause_schedules(self) -> None:
        """Note and pause them: a test that runs over the full hour would find a run nobody ordered among its own."""
        for found in self.ask("/deployments/filter", {}):
            flow = self.ask(f"/flows/{found['flow_id']}")["name"]
            self.schedules[f"{flow}/{found['name']}"] = [
                s["schedule"]["cron"] for s in found["schedules"] if s["active"]
            ]
        self.cli("--no-prompt", "deployment", "schedule", "pause", "--all")

    def ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"content-type": "application/json"})
        for _ in range(30):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                if error.code != 503:  # SQLite is busy: "try again"
                    raise
                time.sleep(1)
        pytest.fail(f"{path}: the server was busy for half a minute")

    def start(self, deployment: str, **parameters: object) -> str:
        """Order a run; gives its id."""
        found = self.ask(f"/deployments/name/{deployment}")
        run = self.ask(
            f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        )
        return str(run["id"])

    def end_of(self, run: str) -> dict[str, Any]:
        """The run's last state."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            state = self.ask(f"/flow_runs/{run}")["state"]
            if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
                return state
            time.sleep(0.5)
        pytest.fail(f"run {run} did not end:\n{self.worker_log.read_text()[-4000:]}")

    def tasks_of(self, run: str) -> dict[str, dict[str, Any]]:
        """The run's tasks by name, once all have ended: their rows appear with a lag."""
        wanted = {"flow_runs": {"id": {"any_": [run]}}}
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            rows = {row["name"]: row for row in self.ask("/task_runs/filter", wanted)}
            if rows and all(
                row["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") for row in rows.values()
            ):
                return rows
            time.sleep(0.5)
        return rows

    def artifacts_of(self, run: str) -> dict[str, str]:
        rows = self.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return {row["key"]: str(row["data"]) for row in rows}


GRAPH = """
stages:
  prepare: {cmd: "echo rows > rows.txt", params: [train.seed], outs: [rows.txt]}
  gate-training:
    cmd: sh ./gate.sh
    deps: [rows.txt, gate.sh, verdict.json]
    outs: [reports/gates/training.json: {cache: false}]
  serve-validate: {cmd: "echo served", deps: [rows.txt, reports/gates/training.json], always_changed: true}
  benchmark: {cmd: "echo measured", deps: [rows.txt, reports/gates/training.json]}
  train: {cmd: sh ./train.sh, deps: [train.sh]}
"""
GATE = "mkdir -p reports/gates\ncp verdict.json reports/gates/training.json\nsleep 1\ngrep -q '\"success\": true' verdict.json || { echo 'refused: no' >&2; exit 1; }\n"


def _give_verdict(repo: Path, success: bool) -> None:
    gate_report("training", ZERO, success).write(repo / "verdict.json")


def copy_code(repo_root: Path, repo: Path) -> None:
    """What a clone needs to be deployed."""
    for part in ("flows", "stages"):
        shutil.copytree(repo_root / part, repo / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(repo_root / "prefect.yaml", repo / "prefect.yaml")


def make_clone(root: Path, repo_root: Path) -> Path:
    repo = make_repo(root, GRAPH.lstrip())
    (repo / "gate.sh").write_text(GATE)
    (repo / "train.sh").write_text("echo trained\n")
    copy_code(repo_root, repo)
    shutil.copyfile(repo_root / "params.yaml", repo / "params.yaml")
    write_draft(repo)
    (repo / "dvc.lock").unlink()  # DVC writes its own
    _give_verdict(repo, True)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "a clone")
    return repo


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(ready: Any, what: str, log: Path, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except OSError:
            pass
        time.sleep(0.5)
    pytest.fail(f"{what} not up after {limit_s:g} s:\n{log.read_text()[-4000:]}")


def _start(words: list[str], env: dict[str, str], cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "prefect", *words], env=env, cwd=cwd, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@contextmanager
def prefect_server(home: Path, repo: Path, more: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A Prefect server of its own in `home`, the deployments of prefect.yaml in `repo`, their schedules paused, and a worker.

    `more` is added to the environment.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    env |= more or {}
    running = [_start(["server", "start", "--host", "127.0.0.1", "--port", str(port)], env, home, home / "server.log")]
    it = Server(url, env, repo, home / "worker.log")
    try:
        wait_for(lambda: it.ask("/health") is True, "server", home / "server.log", 300)
        it.cli("work-pool", "create", "draftline", "--type", "process")
        it.cli("--no-prompt", "deploy", "--all")
        it.pause_schedules()
        it.start_worker()
        yield it
    finally:
        for process in [*([it.worker] if it.worker else []), *running]:
            _stop(process)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("prefect")
    with prefect_server(home, make_clone(home / "clone", repo_root)) as it:
        yield it


def test_the_deployments_have_their_schedules_and_retrain_one_run_at_a_time(server: Server) -> None:
    assert server.schedules == {
        "retrain/weekly": ["0 3 * * 1"],
        "audit/nightly": ["30 1 * * *"],
        "drift/hourly": ["0 * * * *"],
        "promote/promote": [],
        "rollback/rollback": [],
    }
    weekly = server.ask("/deployments/name/retrain/weekly")
    assert weekly["global_concurrency_limit"]["limit"] == 1
    assert weekly["concurrency_options"]["collision_strategy"] == "ENQUEUE"


def test_a_run_of_the_deployment_completes_with_its_tasks_artifacts_and_release(server: Server) -> None:
    told = server.cli("deployment", "run", "retrain/weekly")
    run = re.findall(r"UUID: ([0-9a-f-]{36})", told)[0]
    state = server.end_of(run)
    assert state["type"] == "COMPLETED", state["message"]
    name = json.loads((server.repo / "releases/current.json").read_text())["release"]
    assert state["message"] == f"Release {name}: accept length 1.60"
    assert set(server.tasks_of(run)) == {"prepare", "gate-training", "serve-validate", "benchmark", "train"}
    found = server.artifacts_of(run)
    assert set(found) == {"gate-training", "accept-length", "throughput", "policy", "release"}
    assert "# gate-training: passed" in found["gate-training"]
    assert "coding" in found["accept-length"] and "1.30 (1.20..1.40)" in found["throughput"]


def test_a_refusal_fails_the_run_in_the_gates_words_without_a_retry_and_promotes_nothing(server: Server) -> None:
    pointer = server.repo / "releases/current.json"
    before = pointer.read_bytes() if pointer.exists() else None
    _give_verdict(server.repo, False)
    try:
        run = server.start("retrain/weekly")
        state = server.end_of(run)
    finally:
        _give_verdict(server.repo, True)
    assert state["type"] == "FAILED"
    assert "gate-training refused the draft" in state["message"]
    assert "got [0, 3, 16] (slot 0, slot 1); capture again with the points of params.yaml" in state["message"]
    tasks = server.tasks_of(run)
    assert tasks["gate-training"]["run_count"] == 1
    assert set(tasks) == {"prepare", "gate-training"}
    assert "**refused**" in server.artifacts_of(run)["gate-training"]
    assert (pointer.read_bytes() if pointer.exists() else None) == before


def _pid(path: Path) -> int:
    wait_for(lambda: path.exists() and path.read_text().strip(), str(path), path.parent / "train.sh")
    return int(path.read_text())


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("how", ["time limit", "cancelled"])
def test_a_run_that_is_ended_leaves_no_child(server: Server, how: str) -> None:
    pid_file = server.repo / "sleeper.pid"
    pid_file.unlink(missing_ok=True)
    (server.repo / "train.sh").write_text(f"# {how}\nsleep 300 & echo $! > sleeper.pid; wait\n")
    try:
        run = server.start("retrain/weekly", stage_time_limit_s=8 if how == "time limit" else 600)
        sleeper = _pid(pid_file)
        if how == "cancelled":
            server.cli("flow-run", "cancel", run)
        state = server.end_of(run)
        wait_for(lambda: _gone(sleeper), "the sleeper's end", server.worker_log, 40)
    finally:
        (server.repo / "train.sh").write_text("echo trained\n")
    if how == "time limit":
        assert state["type"] == "FAILED" and "took longer than it may" in state["message"]
        assert server.tasks_of(run)["train"]["run_count"] == 1
    else:
        assert state["type"] == "CANCELLED"


class _Inbox(BaseHTTPRequestHandler):
    """Takes what a webhook sends."""

    got: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.got.append(self.rfile.read(int(self.headers["content-length"])).decode())
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def inbox(server: Server) -> Iterator[list[str]]:
    """Messages that the notification block custom-webhook/inbox of the Prefect server sends."""
    http = HTTPServer(("127.0.0.1", 0), _Inbox)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    code = (
        "from prefect.blocks.notifications import CustomWebhookNotificationBlock as Hook\n"
        f"Hook(name='inbox', url='http://127.0.0.1:{http.server_port}/', json_data={{'text': '{{{{subject}}}}'}}).save('inbox')"
    )
    subprocess.run([sys.executable, "-c", code], env=server.env, check=True, capture_output=True)
    _Inbox.got.clear()
    yield _Inbox.got
    http.shutdown()


def test_a_run_is_recorded_on_a_branch_and_people_are_told(server: Server, inbox: list[str]) -> None:
    _give_verdict(server.repo, False)
    told = {"commit_to": "runs", "notify": "custom-webhook/inbox"}
    try:
        assert server.end_of(server.start("retrain/weekly", **told))["type"] == "FAILED"
    finally:
        _give_verdict(server.repo, True)
    assert server.end_of(server.start("retrain/weekly", **told))["type"] == "COMPLETED"
    log = subprocess.run(
        ["git", "log", "--format=%s", "runs"], cwd=server.repo, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert log[0].startswith("retrain: Release ") and log[1] == "retrain: gate-training refused the draft"
    assert "retrain failed: gate-training refused the draft" in inbox[0] and "retrain done: Release" in inbox[1]


def test_a_rollback_with_nothing_before_it_fails_in_words(server: Server) -> None:
    state = server.end_of(server.start("rollback/rollback"))
    assert state["type"] == "FAILED"
    assert "no release to roll back to" in state["message"]
