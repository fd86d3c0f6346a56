"""A server takes what was promoted, is looked at, and gets the release before back by itself when that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flows import promote as flow
from flows import release, serving
from stages.contracts.canary import CANARY, Canary, CanaryRequest
from stages.contracts.params import Promotion, load_promotion
from stages.contracts.release import current
from tests.flows import draft_server
from tests.flows.s3 import free_ports
from tests.flows.samples import write_draft

SERVER = Path(draft_server.__file__)


def _settings(root: Path, **changes: object) -> Promotion:
    path = root / "params.yaml"
    told = yaml.safe_load(path.read_text())
    told["promotion"] |= changes
    path.write_text(yaml.safe_dump(told))
    return load_promotion(path)


def _draft(root: Path, weights: str, validated: float = 1.6) -> None:
    """A draft that passed, validated at this accept length, with its canary requests."""
    draft = write_draft(root, weights.encode())
    verifications = round(draft_server.TOKENS / validated)
    Canary(
        draft_digest=draft.digest(),
        engine="sglang",
        engine_version="0.5.23",
        max_new_tokens=80,
        requests=tuple(
            CanaryRequest(prompt_id=p, ids=(1, 2, 3), tokens=draft_server.TOKENS, verifications=verifications)
            for p in ("a", "b")
        ),
    ).write(root / CANARY)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    """A clone whose promotions restart a server."""
    port, pid_file = free_ports(1)[0], tmp_path / "server.pid"
    root = tmp_path / "clone"
    _draft(root, "at 1.6")
    command = [sys.executable, str(SERVER), str(port), str(pid_file)]
    _settings(root, restart_command=command, server_url=f"http://127.0.0.1:{port}", restart_limit_s=15)
    try:
        yield root
    finally:
        draft_server.stop(pid_file)


def _promote(root: Path) -> str:
    return flow.take_or_go_back(root, release.promote(root), lambda _: None)


def test_a_release_that_serves_as_validated_stays(served: Path) -> None:
    assert _promote(served) == "canary of 2 requests: accept length 1.600, validated 1.600"
    assert (served / "releases" / str(current(served)) / "evidence/canary.json").exists()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("at 1.2", "falls short of the release's own accept length(.|\n)*accept length 1.203, validated 1.600"),
        ("none", "answers without a draft(.|\n)*speculative|answers without a draft"),
    ],
)
def test_a_release_that_fails_where_it_is_served_is_rolled_back_and_the_one_before_served_again(
    served: Path, weights: str, words: str
) -> None:
    _promote(served)
    good = current(served)
    _draft(served, weights)
    with pytest.raises(serving.ServerFault, match=words) as told:
        _promote(served)
    assert told.value.do == (
        f"rolled back by itself to release {good}: canary of 2 requests: accept length 1.600, validated 1.600"
    )
    assert current(served) == good
    assert release.ledger(served)[-1]["words"].startswith("by itself: The server")  # type: ignore[attr-defined]
    release.follow(served)
    assert serving.ask(
        Canary.read(served / "releases" / str(good) / "evidence/canary.json"), load_promotion(served / "params.yaml")
    ).accept_length == pytest.approx(1.6)


def test_a_server_that_never_becomes_healthy_and_a_first_release_that_fails_are_told(served: Path) -> None:
    _settings(served, restart_limit_s=2)
    _draft(served, "silent")
    with pytest.raises(serving.ServerFault, match=r"not healthy in time(.|\n)*HTTP 503") as told:
        _promote(served)
    assert "could not be rolled back (There is no release to roll back to)" in told.value.do


def test_a_restart_command_that_fails_is_told_in_its_own_words(served: Path) -> None:
    _settings(served, restart_command=["sh", "-c", "echo no such unit; exit 5"])
    with pytest.raises(serving.ServerFault, match=r"did not end well(.|\n)*exit code 5: no such unit"):
        _promote(served)
    _settings(served, restart_command=["no-such-command"])
    with pytest.raises(serving.ServerFault, match=r"did not end well(.|\n)*no-such-command"):
        _promote(served)


def test_without_a_command_a_person_is_told_what_to_start(tmp_path: Path) -> None:
    write_draft(tmp_path)
    words = _promote(tmp_path)
    assert words.startswith("no server was told: start yours with releases/") and str(current(tmp_path)) in words


def test_canary_requests_of_another_draft_do_not_travel_with_a_release(tmp_path: Path) -> None:
    _draft(tmp_path, "at 1.6")
    write_draft(tmp_path, b"another")
    assert "evidence/canary.json" not in release.promote(tmp_path).record.files
