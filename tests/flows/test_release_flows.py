"""promote and rollback under a real Prefect server and worker: approval by a person, retries, words."""

from __future__ import annotations

import shutil
import time

import pytest

from flows import release
from tests.flows.samples import write_draft, write_registry
from tests.flows.test_prefect import Server, server  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow


def paused(it: Server, run: str) -> None:
    deadline = time.monotonic() + 90
    while it.ask(f"/flow_runs/{run}")["state"]["type"] != "PAUSED":
        assert time.monotonic() < deadline, it.worker_log.read_text()[-3000:]
        time.sleep(0.3)


def answer(it: Server, run: str, **words: object) -> None:
    told = it.ask(f"/flow_runs/{run}/resume", {"run_input": words})
    assert told["status"] == "ACCEPT", told


def test_promotion_with_approval_rollback_with_a_reason_and_a_store_that_fails(server: Server) -> None:  # noqa: F811
    repo = server.repo
    params = repo / "params.yaml"  # drafts of a few bytes cannot be measured beside each other
    params.write_text(params.read_text().replace("production_beside: if_measured", "production_beside: ignore"))
    write_draft(repo, b"one")
    first = server.start("promote/promote")
    ended = server.end_of(first)
    assert ended["type"] == "COMPLETED", ended
    one = release.current(repo)
    assert f"Release {one}: accept length 1.60" in ended["message"]
    assert "# eagle3 draft for tiny" in server.artifacts_of(first)["model-card"]

    write_draft(repo, b"two")
    refused = server.start("promote/promote", approval=True)
    paused(server, refused)
    assert "candidate" in release.list_releases(repo) and release.current(repo) == one
    answer(server, refused, approve=False, by="Ada", words="too slow at 16")
    ended = server.end_of(refused)
    assert ended["type"] == "FAILED" and "not approved" in ended["message"] and "too slow at 16" in ended["message"]
    assert release.current(repo) == one

    approved = server.start("promote/promote", approval=True)
    paused(server, approved)
    answer(server, approved, approve=True, by="Ada", words="")
    assert server.end_of(approved)["type"] == "COMPLETED"
    two = release.current(repo)
    assert two != one and release.ledger(repo)[-1]["words"].endswith("approved by Ada")

    shutil.rmtree(repo / "releases" / str(one))  # days later, on a machine that never had it
    back = server.end_of(server.start("rollback/rollback", why="accept length fell"))
    assert back["type"] == "COMPLETED" and back["message"].startswith(
        f"Back to release {one}: accept length 1.60; no server"
    )
    assert release.current(repo) == one and release.ledger(repo)[-1]["words"] == "accept length fell"

    write_registry(repo, uri="s3:nowhere")
    bad = server.end_of(server.start("rollback/rollback"))
    assert bad["type"] == "FAILED" and "names no bucket" in bad["message"]
    assert release.current(repo) == one
