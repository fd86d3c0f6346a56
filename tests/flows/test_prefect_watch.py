"""Audit and watch under a real Prefect server and worker: a fall of a real metrics page starts retrain by itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import release
from flows.drifting.state import STATE
from tests.flows.test_prefect import Server, server

__all__ = ["server"]
pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parent / "metrics/sglang_0.5.23_1.txt").read_text()


class Engine:
    """A web server that shows SGLang's captured page with counters that a test moves on."""

    def __init__(self) -> None:
        self.tokens, self.verified, self.version = 328.0, 158.0, "0.5.23"
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = {
                    "/metrics": engine.page,
                    "/server_info": lambda: json.dumps({"version": engine.version, "model_path": "/models/target"}),
                    "/model_info": lambda: json.dumps({"model_path": "/models/target", "weight_version": "default"}),
                }.get(self.path)
                self.send_response(200 if told else 404)
                self.end_headers()
                self.wfile.write((told() if told else "").encode())

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def page(self) -> str:
        text = PAGE.replace('model_name="/models/target"} 158.0', f'model_name="/models/target"}} {self.verified}')
        return text.replace('model_name="/models/target"} 328.0', f'model_name="/models/target"}} {self.tokens}')

    def serve(self, accept_length: float, verifications: int = 5000) -> None:
        self.verified += verifications
        self.tokens += round(accept_length * verifications)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.http.shutdown()


def _watch(repo: Path, url: str, root: Path) -> None:
    """The shipped params with this endpoint; the clone's own are those of its shell stages."""
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["drift"] |= {"endpoints": [url], "reference_windows": 12, "min_verifications": 1000}
    (repo / "params.yaml").write_text(yaml.safe_dump(params))


def _promoted(repo: Path) -> str:
    """The clone's draft as a release; its shell stages have not run yet."""
    if not (repo / "dvc.lock").exists():
        (repo / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n")
    return release.promote(repo).name


def _events(server: Server) -> list[dict[str, Any]]:
    wanted = {"filter": {"event": {"name": ["draftline.drift.fall"]}}}
    return server.ask("/events/filter", wanted)["events"]


def test_a_fall_opens_an_event_that_starts_retrain_and_steady_looks_do_not(
    server: Server, engine: Engine, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted = _promoted(server.repo)
    _watch(server.repo, engine.url, repo_root)
    monkeypatch.chdir(server.repo)
    from flows.drift import one_look

    one_look(server.repo)
    for i in range(12):
        engine.serve(1.6 + 0.01 * (i % 3))
        one_look(server.repo)
    engine.serve(1.61)
    steady = server.end_of(server.start("drift/hourly"))
    assert steady["type"] == "COMPLETED" and steady["message"].startswith("steady: 1.6"), steady
    assert _events(server) == []
    engine.version = "0.6.0"
    for _ in range(6):
        engine.serve(1.2)
        run = server.start("drift/hourly")
        told = server.end_of(run)
        if told["message"].startswith("fallen"):
            break
    assert told["message"].startswith("fallen: accept length fell to 1.2"), told
    assert "another engine: version: 0.5.23 -> 0.6.0" in told["message"]
    assert f"Release `{promoted}`" in server.artifacts_of(run)["drift"]
    deadline, retrains = time.monotonic() + 90, []
    while time.monotonic() < deadline and not (_events(server) and retrains):
        wanted = {"flows": {"name": {"any_": ["retrain"]}}}
        retrains = server.ask("/flow_runs/filter", wanted)
        retrains = [r for r in retrains if r["created_by"] and r["created_by"]["type"] == "AUTOMATION"]
        time.sleep(1)
    event = _events(server)[0]
    assert event["payload"]["cause"] == "engine" and event["payload"]["release"] == promoted
    assert event["resource"]["prefect.resource.id"] == f"draftline.release.{promoted}"
    assert len(retrains) == 1, "the event starts retrain/weekly, once"
    server.end_of(retrains[0]["id"])
    (server.repo / STATE).unlink()


def test_the_nightly_audit_fails_by_name_and_leaves_its_page(server: Server) -> None:
    """The shell stages' release stands on no rows, and the audit says so."""
    _promoted(server.repo)
    run = server.start("audit/nightly")
    state = server.end_of(run)
    assert state["type"] == "FAILED" and "findings; the first:" in state["message"]
    found = server.artifacts_of(run)
    assert set(found) == {"audit", "audit-findings"}
    assert "The manifest of the merged set is nowhere" in found["audit-findings"]
    page = (server.repo / "logs/audit.html").read_text()
    assert "The manifest of the merged set is nowhere" in page and "<svg" in page


def test_without_an_endpoint_the_watch_rests(server: Server, repo_root: Path) -> None:
    (server.repo / "params.yaml").write_text((repo_root / "params.yaml").read_text())
    state = server.end_of(server.start("drift/hourly"))
    assert (state["type"], state["message"][:22]) == ("COMPLETED", "No endpoint is watched")
