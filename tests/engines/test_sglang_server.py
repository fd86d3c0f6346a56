"""Starting a server, reading its settings back, answers and states from it: against a small server with SGLang's manners."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.contracts.errors import EngineError
from stages.contracts.params import SGLang
from stages.engines import sglang
from stages.engines._requests import Request
from stages.engines._sglang_process import members
from stages.engines.sglang import Server, demand_alike, serve
from tests.engines.test_sglang_launch import DRAFT, launch, told

Pretend = Callable[..., SGLang]
REQUESTS = [Request(f"p{i}", tuple(range(3, 6 + i)), 4 + i) for i in range(4)]


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Settings whose `python` starts the pretender, which then misbehaves as told."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("pretend_sglang.py"), tmp_path)
    (tmp_path / "python").write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {tmp_path}/pretend_sglang.py "$@"\n')
    (tmp_path / "python").chmod(0o755)

    def settings(*, misdeeds: dict[str, Any] | None = None, **values: Any) -> SGLang:
        (tmp_path / "misdeeds").write_text(json.dumps(misdeeds or {}))
        return told(python="python", **values)

    return settings


def started(settings: SGLang, **how: Any) -> Any:
    return serve(launch(**how), settings, label="test")


def test_answers_carry_their_verifications_and_the_server_is_gone_afterwards(pretend: Pretend) -> None:
    ended: list[str] = []
    with started(pretend()) as server:
        answers = server.generate(REQUESTS, concurrency=2, draft_steps=3, on_answer=lambda a: ended.append(a.prompt_id))
        group = next(iter({int(Path(f"/proc/{p}/stat").read_text().split()[4]) for p in _children()}))
        assert members(group)
    assert members(group) == []
    assert [a.prompt_id for a in answers] == [r.prompt_id for r in REQUESTS] and sorted(ended) == sorted(
        a.prompt_id for a in answers
    )
    assert [a.accepted for a in answers] == [(2,), (2, 1), (2, 2), (2, 2)]
    for request, answer in zip(REQUESTS, answers, strict=True):
        assert len(answer.ids) == request.max_new_tokens and answer.finish == "length"
        assert 0 < answer.first_token_ms <= answer.latency_ms
    assert Path("logs/sglang/test.log").exists()


def _children() -> list[int]:
    """Children of this process that the test has started: earlier tests may have left some, a resource tracker say."""
    return sorted(_alive() - _BEFORE)


_BEFORE: set[int] = set()


def _alive() -> set[int]:
    return {int(p) for p in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


@pytest.fixture(autouse=True)
def _note_children() -> None:
    _BEFORE.clear()
    _BEFORE.update(_alive())


def test_without_a_draft_every_token_is_a_step_of_its_own(pretend: Pretend) -> None:
    with started(pretend(), draft=None, draft_steps=0) as server:
        (answer,) = server.generate(REQUESTS[:1], concurrency=1)
        with pytest.raises(EngineError, match="drafts another number of tokens"):
            server.generate(REQUESTS[:1], concurrency=1, draft_steps=2)
    assert answer.accepted == (0, 0, 0)


def test_states_of_watched_prompts_follow_their_tokens(pretend: Pretend) -> None:
    seen: dict[str, torch.Tensor] = {}
    with started(pretend()) as server:
        (_, second, *_) = server.generate(
            REQUESTS, concurrency=4, draft_steps=3, observe=lambda p, first, s: seen.update({p: s}), watch={"p1"}
        )
    assert set(seen) == {"p1"}
    tokens = [*REQUESTS[1].prompt_ids, *second.ids][:-1]
    assert seen["p1"][:, 0].tolist() == [float(t) for t in tokens]


def test_fewer_states_than_tokens_are_refused(pretend: Pretend) -> None:
    with (
        started(pretend(misdeeds={"cached": 2})) as server,
        pytest.raises(EngineError, match="2 of the tokens came from") as error,
    ):
        server.states((5, 6, 7))
    assert "3 states" in error.value.expected and "--disable-radix-cache" in error.value.do


@pytest.mark.parametrize(
    ("misdeeds", "words"),
    [
        (
            {"info": {"attention_backend": "torch_native"}},
            "attention_backend: 'intel_amx' was asked for, 'torch_native'",
        ),
        ({"info": {"speculative_algorithm": None}}, "speculative_algorithm: 'EAGLE3' was asked for, None is in effect"),
        ({"info": {"version": "0.5.22"}}, "another SGLang"),
    ],
)
def test_a_server_with_other_settings_or_of_another_version_is_ended_and_refused(
    pretend: Pretend, misdeeds: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=words), started(pretend(misdeeds=misdeeds)):
        pytest.fail("it was let through")
    assert not _children()


def test_speculation_that_does_nothing_is_refused(pretend: Pretend) -> None:
    with (
        started(pretend(misdeeds={"inert": True})) as server,
        pytest.raises(EngineError, match="without verifying any draft"),
    ):
        server.generate(REQUESTS, concurrency=1, draft_steps=3)


def test_an_answer_that_was_aborted_is_no_answer(pretend: Pretend) -> None:
    with (
        started(pretend(misdeeds={"finish": "abort"})) as server,
        pytest.raises(EngineError, match="did not finish an answer"),
    ):
        server.generate(REQUESTS, concurrency=1, draft_steps=3)


def test_the_server_s_own_words_are_told(pretend: Pretend) -> None:
    with started(pretend()) as server, pytest.raises(EngineError, match=r"HTTP 400(.|\n)*longer than the context"):
        server.generate([Request("long", (1,) * 2000, 1)], concurrency=1, draft_steps=3)


def test_what_cannot_work_is_refused_before_anything_starts(pretend: Pretend) -> None:
    with pytest.raises(EngineError, match="the longest request has 5000 tokens"), started(pretend(), positions=5000):
        pytest.fail("it was let through")
    assert not Path("logs").exists()


def test_a_running_server_is_judged_by_its_own_settings_and_left_running(pretend: Pretend) -> None:
    settings = pretend()
    with started(settings) as own:
        url = own.client.url
        with serve(launch(), settings, label="attached", url=url) as attached:
            assert attached.generate(REQUESTS, concurrency=2, draft_steps=3)[0].ids
        assert own.generate(REQUESTS, concurrency=2, draft_steps=3)[0].ids
        with (
            pytest.raises(EngineError, match="the longest request has 2000 tokens") as error,
            serve(launch(positions=2000), settings, label="attached", url=url),
        ):
            pytest.fail("it was let through")
        assert url in error.value.where
        with (
            pytest.raises(EngineError, match="another number of tokens than params"),
            serve(launch(draft_steps=2), settings, label="attached", url=url),
        ):
            pytest.fail("it was let through")
    assert not Path("logs/sglang/attached.log").exists()


def test_servers_started_unlike_are_not_compared() -> None:
    client: Any = None
    with pytest.raises(EngineError, match="max_running_requests: 8 and 64"):
        demand_alike(Server(client, {"max_running_requests": 8}, 0), {"max_running_requests": 64})


def test_the_version_is_the_one_the_environment_is_built_with() -> None:
    root = Path(__file__).resolve().parents[2]
    pinned = f"sglang=={sglang.VERSION}"
    assert pinned in (root / "requirements-sglang-engine.txt").read_text().splitlines()
    assert f"v{sglang.VERSION}" in (root / "docker/sglang.Dockerfile").read_text()
    assert f'SGLANG_VERSION = "{sglang.VERSION}"' in (root / "sglang_cpu/draftline_sglang_cpu/__init__.py").read_text()
    assert DRAFT.points == DRAFT.served_points
