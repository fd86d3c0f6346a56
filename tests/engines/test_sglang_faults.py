"""What goes wrong between us and a server is told in words: cut streams, refusals, silence, wrong counts, a cache that is not off."""

from __future__ import annotations

from typing import Any

import pytest

from stages.contracts.errors import EngineError
from stages.engines import sglang
from stages.engines._requests import Request
from stages.engines._sglang_checks import differing_at_all
from stages.engines._sglang_http import Client
from stages.engines.sglang import Server, demand_equal_settings
from tests.engines.test_sglang_server import REQUESTS, Pretend, started
from tests.engines.test_sglang_server import pretend as pretend


@pytest.mark.parametrize(
    ("misdeeds", "words"),
    [
        ({"cut_after": 2}, "did not finish an answer(.|\n)*got: None"),
        ({"cut_after": 0}, "did not finish an answer"),
        ({"status": 500}, "refused what was asked(.|\n)*HTTP 500: (.|\n)*The scheduler is gone"),
        ({"garbles": 9}, "an event that is no JSON"),
        ({"miscounts": 1}, "counts other tokens than it sent(.|\n)*completion_tokens 4, as many as came(.|\n)*got: 5"),
        ({"histogram": [0, 0, 9]}, "counts of an answer contradict each other"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_an_answer_that_did_not_come_whole_is_refused(pretend: Pretend, misdeeds: dict[str, Any], words: str) -> None:
    with started(pretend(misdeeds=misdeeds)) as server, pytest.raises(EngineError, match=words):
        server.generate(REQUESTS[:1], concurrency=1, draft_steps=3)


def test_a_server_that_stays_silent_is_given_up(pretend: Pretend) -> None:
    with started(pretend(misdeeds={"hangs_s": 30})) as server:
        impatient = Server(Client(server.client.url, time_limit_s=0.5), server.info, server.draft_steps)
        with pytest.raises(EngineError, match=r"cannot be reached(.|\n)*within 0.5 s"):
            impatient.generate(REQUESTS[:1], concurrency=1, draft_steps=3)


def test_requests_are_sent_when_they_are_due_whatever_is_under_way(pretend: Pretend) -> None:
    """Each answer takes 0.4 s; one after the other three would take 1.2 s."""
    requests = [Request(f"p{i}", (3, 4 + i), 2) for i in range(3)]
    with started(pretend(misdeeds={"hangs_s": 0.4}), draft=None, draft_steps=0) as server:
        answers = server.generate(requests, concurrency=1, arrivals=(0.0, 0.1, 0.2))
    assert [a.prompt_id for a in answers] == ["p0", "p1", "p2"]
    for answer in answers:
        assert 400 <= answer.latency_ms < 900 and 0 <= answer.late_ms < 300


def test_stop_conditions_reach_the_server(pretend: Pretend) -> None:
    whole = (12, 13, 14, 15, 16, 17)
    with started(pretend(), draft=None, draft_steps=0) as server:
        by_token, by_string, free = server.generate(
            [Request("t", (12,), 6, stop_ids=(14,)), Request("s", (12,), 6, stop=("PQ",)), Request("f", (12,), 6)],
            concurrency=1,
        )
    assert (free.ids, free.text, free.finish) == (whole, "MNOPQR", "length")
    assert (by_token.ids, by_token.finish) == (whole[:3], "stop")
    assert (by_string.ids, by_string.text, by_string.finish) == (whole[:5], "MNO", "stop")


def test_the_prefix_cache_is_emptied_on_request_and_cached_tokens_are_counted(pretend: Pretend) -> None:
    with started(pretend(misdeeds={"cached": 2})) as server:
        assert not server.caches_prefixes
        server.forget()
        assert [a.cached_tokens for a in server.generate(REQUESTS[:2], concurrency=1, draft_steps=3)] == [2, 2]


def server_with(**info: Any) -> Server:
    client: Any = Client("http://127.0.0.1:9", time_limit_s=1)
    return Server(client, {"version": sglang.VERSION, "max_running_requests": 8, "port": 1} | info, 0)


def test_every_setting_but_speculation_must_be_equal_to_be_timed() -> None:
    plain = server_with(random_seed=3)
    drafted = server_with(port=2, random_seed=4, speculative_num_steps=3, _speculative_x=1, startup_time={"a": 1})
    assert demand_equal_settings([plain, drafted]) == 2
    with pytest.raises(EngineError, match=r"max_running_requests: 8 and 64") as error:
        demand_equal_settings([plain, drafted, server_with(max_running_requests=64, schedule_policy="lpm")])
    assert "schedule_policy: None and 'lpm'" in error.value.got


def test_another_model_is_another_setting() -> None:
    faults, _ = differing_at_all({"model_path": "/a"}, {"model_path": "/b"})
    assert faults == ["model_path: '/a' and '/b'"]
