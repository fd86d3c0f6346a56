"""Answers over HTTP by a server that generates real tokens: the engine's own, whatever goes wrong on the way."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from stages.contracts.errors import EngineError
from stages.corpus import server as corpus_server
from stages.corpus.answers import Generated, answer_all, outcomes
from stages.corpus.rendering import Renderer
from stages.corpus.server import KEY_VARIABLE, ServerAnswers, demand_same_rendering
from stages.engines.in_process import InProcess, Request
from stages.targets import load_target
from tests.corpus.completions import Completions, serve
from tests.corpus.families import policy
from tests.tiny import TEMPLATE, make_target

SETTINGS = {"engine": "openai tiny", "weights_digest": "sha256:0", "max_new_tokens": 10}
Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(folder: Path) -> dict[str, Ids]:
    renderer = Renderer(folder, policy())
    return {f"p{i:02}": renderer.prompt([{"role": "user", "content": f"Question {i * i}?"}]) for i in range(24)}


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: dict[str, Ids]) -> dict[str, Generated]:
    engine = InProcess(load_target(folder), slots=8, positions=512)
    answers = engine.generate([Request(p, ids, 10) for p, ids in prompts.items()], concurrency=8)
    return {a.prompt_id: Generated(a.ids, a.finish) for a in answers}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_server, "FIRST_WAIT_S", 0.01)


def client(url: str, **changes: Any) -> ServerAnswers:
    shipped: dict[str, Any] = {
        "base_url": url, "model": "tiny", "concurrency": 6, "timeout_s": 60.0, "retries": 4, "max_new_tokens": 10,
        "temperature": 0.0, "seed": 7, "end_ids": frozenset({2}), "end_id": 2, "vocab_size": 259, "may_retokenise": False,
        "encode": lambda text: (),
    }  # fmt: skip
    return ServerAnswers(**{**shipped, **changes})


def test_answers_are_the_engines_own_through_every_passing_fault(
    folder: Path, prompts: dict[str, Ids], expected: dict[str, Generated], tmp_path: Path
) -> None:
    def fault(number: int, prompt: list[int]) -> Any:
        return {
            2: (429, {"Retry-After": "0.1"}, {"error": "slow down"}),
            5: (500, {}, b"boom"),
            7: "cut",
            9: (503, {"Retry-After": formatdate(time.time() + 1, usegmt=True)}, {}),
            11: "2.5",
            13: (200, {}, b"<html>no completion</html>"),
            15: (200, {}, {"choices": [{"finish_reason": "abort", "text": ""}]}),
        }.get(number)

    with serve(Completions(folder, fault)) as server:
        answers = answer_all(prompts, client(server.url, timeout_s=2.0), SETTINGS, tmp_path, 1)
    assert answers == expected
    assert len(server.asked) >= len(prompts) + 7 and server.most >= 2
    counts = outcomes(answers, frozenset({2}))
    assert sum(counts.values()) == len(prompts) == counts["answered"] + counts["capped"] + counts["empty"]


def test_all_wait_when_the_server_says_when_to_come_back(
    folder: Path, prompts: dict[str, Ids], expected: dict[str, Generated], tmp_path: Path
) -> None:
    began: list[float] = []

    def fault(number: int, prompt: list[int]) -> Any:
        began.append(time.monotonic())
        return (429, {"Retry-After": "0.5"}, {}) if number == 0 else None

    with serve(Completions(folder, fault)) as server:
        assert answer_all(prompts, client(server.url, concurrency=2), SETTINGS, tmp_path, 1) == expected
    gap = max(b - a for a, b in itertools.pairwise(began))
    assert gap > 0.35


def test_sampling_goes_by_the_prompts_own_seed(folder: Path, prompts: dict[str, Ids], tmp_path: Path) -> None:
    prompts = dict(list(prompts.items())[:6])
    with serve(Completions(folder)) as server:
        warm = [
            answer_all(prompts, client(server.url, temperature=0.9, concurrency=c), SETTINGS, tmp_path / str(c), 1)
            for c in (1, 6)
        ]
        other = answer_all(prompts, client(server.url, temperature=0.9, seed=8), SETTINGS, tmp_path / "o", 1)
    assert warm[0] == warm[1] != other


def test_a_refusal_is_told_with_its_reason_and_asked_again_by_the_next_run_alone(
    folder: Path, prompts: dict[str, Ids], expected: dict[str, Generated], tmp_path: Path
) -> None:
    refused = prompts["p03"]

    def fault(number: int, prompt: list[int]) -> Any:
        return (400, {}, {"error": "too long"}) if tuple(prompt) == refused else None

    def filtered(body: dict[str, Any]) -> dict[str, Any]:
        if tuple(body["choices"][0]["prompt_token_ids"]) == prompts["p05"]:
            body["choices"][0]["finish_reason"] = "content_filter"
        return body

    with serve(Completions(folder, fault, filtered)) as server:
        answers = answer_all(prompts, client(server.url), SETTINGS, tmp_path, 1)
        assert len(server.asked) == len(prompts) and 2 <= server.most <= 6
        server.asked.clear()
        assert answer_all(prompts, client(server.url), SETTINGS, tmp_path, 1) == answers
    assert set(server.asked) == {prompts["p03"], prompts["p05"]} and len(server.asked) == 2
    assert answers["p03"] == Generated((), "refused", 'HTTP 400: {"error": "too long"}')
    assert answers["p05"] == Generated((), "refused", "content_filter")
    rest = {p: a for p, a in answers.items() if p not in ("p03", "p05")}
    assert rest == {p: a for p, a in expected.items() if p in rest}
    assert outcomes(answers, frozenset({2}))["refused"] == 2


def test_what_failed_stops_the_run_or_is_counted_and_only_that_is_asked_again(
    folder: Path, prompts: dict[str, Ids], expected: dict[str, Generated], tmp_path: Path
) -> None:
    broken = {prompts["p01"], prompts["p10"]}

    def fault(number: int, prompt: list[int]) -> Any:
        return (500, {}, b"boom") if tuple(prompt) in broken else None

    with serve(Completions(folder, fault)) as server:
        with pytest.raises(EngineError, match=r"too many prompts without an answer[\s\S]*HTTP 500: boom \(3 times\)"):
            answer_all(prompts, client(server.url, retries=2), SETTINGS, tmp_path, 1)
        assert Counter(server.asked)[prompts["p01"]] == 3
        server.asked.clear()
        answers = answer_all(prompts, client(server.url, retries=0), SETTINGS, tmp_path, 1, max_failed_share=0.1)
        assert set(server.asked) == broken and answers["p01"].finish == "failed"
        assert outcomes(answers, frozenset({2}))["failed"] == 2
        broken.clear()
        assert answer_all(prompts, client(server.url), SETTINGS, tmp_path, 1) == expected


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([10**12, 2], "token id 1000000000000; the target's vocabulary has 259"),
        ([-5, 2], "token id -5;"),
        ([259, 2], "token id 259;"),
        ([5.0, 2], "token id 5.0;"),
        ([True, 2], "token id True;"),
        (["5", 2], "token id '5';"),
        ("52", "token ids told as str"),
        ([7] * 11, "11 tokens; 10 may be"),
        ([7] * 10, "11 tokens; 10 may be"),  # with the end of turn that was left out
    ],
    ids=str,
)
def test_ids_that_are_no_answer_of_the_target_fail_and_are_asked_again(
    folder: Path, prompts: dict[str, Ids], expected: dict[str, Generated], tmp_path: Path, ids: Any, why: str
) -> None:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        if tuple(body["choices"][0]["prompt_token_ids"]) == prompts["p04"]:
            body["choices"][0] |= {"token_ids": ids, "finish_reason": "stop", "matched_stop": None}
        return body

    with serve(Completions(folder, change=change)) as server:
        answers = answer_all(prompts, client(server.url, retries=0), SETTINGS, tmp_path, 1, max_failed_share=0.1)
        assert answers["p04"].finish == "failed" and why in answers["p04"].detail
        server.change = lambda body: body
        server.asked.clear()
        assert answer_all(prompts, client(server.url), SETTINGS, tmp_path, 1) == expected
        assert server.asked == [prompts["p04"]]


def test_a_server_that_is_gone_stops_the_run_before_every_prompt_has_failed(
    folder: Path, prompts: dict[str, Ids], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"answers nothing any more[\s\S]*ConnectError"):
        answer_all(prompts, client("http://127.0.0.1:9/v1", retries=1), SETTINGS, tmp_path, 1)


def test_a_server_that_refuses_every_prompt_stops_the_run_and_mended_it_is_asked_again(
    folder: Path, prompts: dict[str, Ids], expected: dict[str, Generated], tmp_path: Path
) -> None:
    with serve(Completions(folder, lambda number, prompt: (400, {}, {"error": "context of 16 tokens"}))) as server:
        with pytest.raises(EngineError, match=r"refuses every prompt[\s\S]*context of 16 tokens"):
            answer_all(prompts, client(server.url, concurrency=2), SETTINGS, tmp_path, 1)
        assert len(server.asked) < len(prompts)
        server.fault = lambda number, prompt: None
        assert answer_all(prompts, client(server.url), SETTINGS, tmp_path, 1) == expected


def test_a_wrong_key_stops_at_once_and_the_key_is_told_nowhere(
    folder: Path,
    prompts: dict[str, Ids],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "s3cret-value")
    caplog.set_level("DEBUG")

    def fault(number: int, prompt: list[int]) -> Any:
        return 401, {}, {"error": "no such key s3cret-value"}

    with serve(Completions(folder, fault)) as server, pytest.raises(EngineError, match="does not take these") as error:
        answer_all(prompts, client(server.url, concurrency=1), SETTINGS, tmp_path, 1)
    assert server.keys == ["Bearer s3cret-value"]
    said = error.value.text() + "".join(capfd.readouterr()) + caplog.text
    assert "s3cret" not in said and KEY_VARIABLE in said
    assert not any(b"s3cret" in f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())


@pytest.mark.parametrize("key", ["s3cret-value\r", " s3cret-value\n"])
@pytest.mark.parametrize("reply", ["401", "500", "echo", "finish"])
def test_a_key_with_an_end_of_line_is_sent_without_it_and_told_nowhere(
    folder: Path, prompts: dict[str, Ids], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, reply: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    said = "x" * 280 + " s3cret-value"  # what is cut short is not cut within the key
    replies: dict[str, Any] = {
        "401": (401, {}, said.encode()), "500": (500, {}, said.encode()), "echo": (200, {}, said.encode()),
        "finish": (200, {}, {"choices": [{"finish_reason": said}]}),
    }  # fmt: skip
    with serve(Completions(folder, lambda number, prompt: replies[reply])) as server:
        with pytest.raises(EngineError) as error:
            answer_all(prompts, client(server.url, concurrency=1, retries=0), SETTINGS, tmp_path, 1)
        demand_same_rendering(server.url, "tiny", {}, Renderer(folder, policy()).probes())
    assert set(server.keys) == {"Bearer s3cret-value"}
    assert "s3c" not in error.value.text()


@pytest.mark.parametrize("key", ["s3cret\r\nvalue", "s3cret-välue", "s3cret value", "s3cret\udc80"])
def test_a_key_that_no_header_holds_stops_in_words_that_name_its_variable_alone(
    prompts: dict[str, Ids], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    told = []
    with pytest.raises(EngineError, match="key cannot be sent") as error:
        answer_all(prompts, client("http://127.0.0.1:9/v1"), SETTINGS, tmp_path, 1)
    told.append(error.value.text())
    with pytest.raises(EngineError, match="key cannot be sent") as error:
        demand_same_rendering("http://127.0.0.1:9/v1", "tiny", {}, [([], ())])
    told.append(error.value.text())
    assert all(KEY_VARIABLE in t and "s3c" not in t and "lue" not in t for t in told)


def test_a_server_that_reads_other_tokens_than_it_is_sent_stops_the_run(
    folder: Path, prompts: dict[str, Ids], tmp_path: Path
) -> None:
    def with_bos(body: dict[str, Any]) -> dict[str, Any]:
        body["choices"][0]["prompt_token_ids"].insert(0, 1)
        return body

    with serve(Completions(folder, change=with_bos)) as server, pytest.raises(EngineError, match="read another prompt"):
        answer_all(prompts, client(server.url), SETTINGS, tmp_path / "a", 1)

    def counted(body: dict[str, Any]) -> dict[str, Any]:
        del body["choices"][0]["prompt_token_ids"]
        body["usage"]["prompt_tokens"] += 1
        return body

    with serve(Completions(folder, change=counted)) as server, pytest.raises(EngineError, match="no second BOS"):
        answer_all(prompts, client(server.url), SETTINGS, tmp_path / "b", 1)


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    for name in ("token_ids", "prompt_token_ids"):
        body["choices"][0].pop(name)
    return body


def test_text_without_token_ids_is_refused_or_tokenised_again_and_mismatches_are_counted(
    folder: Path, prompts: dict[str, Ids], expected: dict[str, Generated], tmp_path: Path
) -> None:
    renderer = Renderer(folder, policy())
    with serve(Completions(folder, change=without_ids)) as server:
        with pytest.raises(EngineError, match=r"tells no token ids[\s\S]*token_ids: retokenise"):
            answer_all(prompts, client(server.url), SETTINGS, tmp_path / "a", 1)
        text = client(server.url, may_retokenise=True, encode=renderer.encode)
        answers = answer_all(prompts, text, SETTINGS, tmp_path / "b", 1)
    whole = {p for p, a in expected.items() if "�" not in renderer.text(a.ids)}
    assert {p: a for p, a in answers.items() if a.finish != "mismatched"} == {p: expected[p] for p in sorted(whole)}
    odd = [a for p, a in answers.items() if p not in whole]
    assert odd and all("tokens, 10 were sampled" in a.detail for a in odd)
    assert outcomes(answers, frozenset({2}))["mismatched"] == len(odd)


def test_an_end_of_turn_that_the_server_leaves_out_is_put_back() -> None:
    closed = client("http://x/v1", end_ids=frozenset({2, 5}))._closed
    assert closed((9, 2), "stop", {}) == (9, 2)
    assert closed((9,), "stop", {"matched_stop": 5}) == (9, 5)
    assert closed((9,), "stop", {"stop_reason": 5}) == (9, 5)
    assert closed((9,), "stop", {"matched_stop": "text"}) == (9, 2)
    assert closed((9,), "length", {}) == (9,)


def test_a_server_with_another_template_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other")
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE.replace("Be brief.", "Be brie!.")  # as many tokens
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = (Renderer(f, policy()) for f in (folder, other))
    probes = ours.probes()
    assert len(probes) == 3
    with serve(Completions(folder)) as server:
        told = demand_same_rendering(server.url, "tiny", {}, probes)
        assert told == "3 conversations rendered as here, compared token by token"
    with (
        serve(Completions(folder, renderer=theirs)) as server,
        pytest.raises(EngineError, match=r"renders conversations otherwise[\s\S]*--chat-template"),
    ):
        demand_same_rendering(server.url, "tiny", {}, probes)
    with pytest.raises(EngineError, match="cannot be reached"):
        demand_same_rendering("http://127.0.0.1:9/v1", "tiny", {}, probes)


DEEP = b"[" * 200_000
NO_JSON: list[Any] = [(200, {}, b"<html>"), (200, {}, [1]), (200, {}, {"tokens": "x", "usage": []}), (200, {}, DEEP)]
NO_JSON += [(200, {}, {"usage": {"prompt_tokens": True}}), (401, {}, b"no"), (200, {}, {"tokens": ["x"]})]


@pytest.mark.parametrize("reply", NO_JSON, ids=lambda reply: str(reply)[:40])
def test_what_is_no_reply_to_a_comparison_is_told_as_none(folder: Path, reply: Any) -> None:
    probes = Renderer(folder, policy()).probes()
    with serve(Completions(folder, tokenized=reply, chatted=reply)) as server:
        told = demand_same_rendering(server.url, "tiny", {}, probes)
        assert told.startswith("3 conversations not compared with those rendered here, for it tells no tokens: HTTP ")
        assert "as here" not in told
        server.chatted = (200, {}, {"usage": {"prompt_tokens": len(probes[0][1])}})
        told = demand_same_rendering(server.url, "tiny", {}, probes[:1])
        assert told == "1 conversations rendered as here, compared by number of tokens"


@pytest.mark.parametrize("reply", [(200, {"Content-Encoding": "gzip"}, b"no gzip"), (200, {}, DEEP), (200, {}, [1])])
def test_replies_that_cannot_be_read_fail_or_stop_in_words(
    folder: Path, prompts: dict[str, Ids], expected: dict[str, Generated], tmp_path: Path, reply: Any
) -> None:
    def fault(number: int, prompt: list[int]) -> Any:
        return reply if tuple(prompt) == prompts["p04"] else (429, {"Retry-After": "nan"}, {}) if number == 2 else None

    with serve(Completions(folder, fault)) as server:
        answers = answer_all(prompts, client(server.url, retries=1), SETTINGS, tmp_path, 1, max_failed_share=0.1)
        assert answers["p04"].finish == "failed" and {p: a for p, a in answers.items() if p != "p04"} == {
            p: a for p, a in expected.items() if p != "p04"
        }
    if reply[1]:
        with (
            serve(Completions(folder, tokenized=reply)) as server,
            pytest.raises(EngineError, match=r"cannot be reached[\s\S]*DecodingError"),
        ):
            demand_same_rendering(server.url, "tiny", {}, Renderer(folder, policy()).probes())


@pytest.mark.parametrize("url", ["http://host:port/v1", f"http://{'a' * 300}/v1", "localhost:9/v1"])
def test_an_address_that_is_none_stops_in_words(prompts: dict[str, Ids], tmp_path: Path, url: str) -> None:
    with pytest.raises(EngineError, match=r"cannot be reached|answers nothing any more"):
        answer_all(prompts, client(url, retries=0), SETTINGS, tmp_path, 1)
    with pytest.raises(EngineError, match=r"cannot be reached[\s\S]*mend prepare.answers.base_url"):
        demand_same_rendering(url, "tiny", {}, [([], ())])


CHILD = """
import json, sys
from pathlib import Path
from stages.corpus.answers import answer_all
from stages.corpus.server import ServerAnswers
told = json.load(sys.stdin)
prompts = {p: tuple(ids) for p, ids in told["prompts"].items()}
client = ServerAnswers(**{**told["client"], "end_ids": frozenset(told["client"]["end_ids"]), "encode": tuple})
answer_all(prompts, client, told["settings"], Path(told["cache"]), 1)
"""


def test_killed_and_resumed_it_gives_the_same_answers_and_asks_only_for_what_is_missing(
    folder: Path, prompts: dict[str, Ids], expected: dict[str, Generated], tmp_path: Path, repo_root: Path
) -> None:
    with serve(Completions(folder, lambda number, prompt: "0.05")) as server:
        told = {n: v for n, v in vars(client(server.url, concurrency=2)).items() if n[0] != "_" and n != "encode"}
        told["end_ids"] = sorted(told["end_ids"])
        handed = {"prompts": prompts, "client": told, "settings": SETTINGS, "cache": str(tmp_path)}
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, cwd=repo_root)
        assert child.stdin is not None
        child.stdin.write(json.dumps(handed).encode())
        child.stdin.close()
        deadline = time.monotonic() + 60
        while sum(f.read_bytes().count(b"\n") for f in tmp_path.glob("*/worker-0.jsonl")) < 5:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        (kept,) = tmp_path.glob("*/worker-0.jsonl")
        there = {json.loads(line)[0] for line in kept.read_bytes().split(b"\n")[:-1]}
        assert 5 <= len(there) < len(prompts)
        time.sleep(0.2)  # what was under way when it was killed
        server.asked.clear()
        assert answer_all(prompts, client(server.url), SETTINGS, tmp_path, 1) == expected
    assert sorted(server.asked) == sorted(ids for p, ids in prompts.items() if p not in there)
