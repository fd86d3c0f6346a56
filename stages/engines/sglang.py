"""SGLang as the engine: a server of its own, started from params and the draft's record, or one that runs already.

Parts: _sglang_launch.py (the command), _sglang_checks.py (what is checked before anything starts), _sglang_process.py (a process group that cannot
outlive us), _sglang_http.py (talking to it), _sglang_answers.py (its counts in this project's terms). Everything is for
version 0.5.23: a newer server numbers layers and counts as it likes.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stages.contracts.errors import EngineError
from stages.contracts.params import SGLang
from stages.engines._requests import Answer, Request
from stages.engines._sglang_answers import Mark, accepted_counts, mark_of, rows_of
from stages.engines._sglang_checks import DraftFacts, check_launch, differing, unmet
from stages.engines._sglang_http import Client
from stages.engines._sglang_launch import Launch, command, environment
from stages.engines._sglang_process import ServerProcess

__all__ = ["DIALECT", "NAME", "VERSION", "Answer", "DraftFacts", "Launch", "Request", "Server", "demand_alike", "serve"]

NAME = "sglang"
VERSION = "0.5.23"
DIALECT = "sglang"  # of layer ids, in stages/capture/dialects.py
LOGS = Path("logs/sglang")
_ANSWER_LIMIT_S = 3600.0  # for one answer, waiting in the server's queue included
_STATE_TOKENS = 512  # of a prompt whose states are asked for: they travel as text
_STATE_ANSWER = 8  # decoded tokens whose states are asked for too
# Settings under which answers with and without a draft are compared.
ALIKE = (
    "version", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "context_length", "disable_radix_cache",
    "max_running_requests", "tp_size", "dp_size", "ep_size",
)  # fmt: skip


class Server:
    """A server that answers. `draft_steps` is what it drafts a verification, 0 for a server without a draft."""

    def __init__(self, client: Client, info: Mapping[str, Any], draft_steps: int) -> None:
        self.client, self.info, self.draft_steps = client, info, draft_steps
        self._incremental = bool(info.get("incremental_streaming_output"))

    @property
    def version(self) -> str:
        return f"sglang {self.info.get('version')}"

    def generate(
        self,
        requests: Iterable[Request],
        *,
        concurrency: int,
        draft_steps: int = 0,
        on_answer: Callable[[Answer], None] | None = None,
        observe: Callable[[str, int, Tensor], None] | None = None,
        watch: Collection[str] | None = None,
    ) -> list[Answer]:
        """Answer all requests, at most `concurrency` at once; answers come in the requests' order.

        Args:
            draft_steps: must be what the server was started with.
            observe: called with (prompt_id, 0, states [n, F]) of the target at the points that feed the draft, for the prompts in
                `watch` (None: all), asked for again when all are answered.

        Raises:
            EngineError: another draft length, a request the server refuses, counts that contradict each other, or fewer
                states than tokens.
        """
        if draft_steps != self.draft_steps:
            raise EngineError(
                "This server drafts another number of tokens",
                expected=f"{self.draft_steps} drafted tokens a verification, as it was started",
                got=str(draft_steps),
                do="open a server for each draft length",
            )
        waiting = list(requests)
        pool = ThreadPoolExecutor(concurrency)
        try:
            futures = [pool.submit(self._answer, request) for request in waiting]
            for done in as_completed(futures):
                if on_answer is not None:
                    on_answer(done.result())
            answers = [f.result() for f in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # nothing is left to wait for, or it failed
        if observe is not None:
            for request, answer in zip(waiting, answers, strict=True):
                if watch is None or request.prompt_id in watch:
                    observe(request.prompt_id, 0, self._fed(request, answer))
        return answers

    def _answer(self, request: Request) -> Answer:
        started = time.perf_counter()
        body = {"input_ids": list(request.prompt_ids), "sampling_params": _sampling(request), "stream": True}
        marks: list[Mark] = []
        ids: list[int] = []
        first_ms, finish = 0.0, None
        for event in self.client.stream("/generate", body):
            first_ms = first_ms or (time.perf_counter() - started) * 1e3
            meta, told = event["meta_info"], event.get("output_ids") or []
            ids = ids + told if self._incremental else told
            marks.append(mark_of(meta))
            finish = meta.get("finish_reason") or finish
        kind = self._finish(request, ids, finish)
        if self.draft_steps and len(ids) > 1 and not marks[-1].verifications:
            raise EngineError(
                "The server answers without verifying any draft",
                where=f"prompt {request.prompt_id}",
                expected="a count of verifications in every answer of two tokens or more",
                got=f"{len(ids)} tokens and no count",
                do="see the log for why speculation is off",
            )
        accepted = accepted_counts(marks, request.prompt_id) if self.draft_steps else (0,) * max(0, len(ids) - 1)
        latency_ms = (time.perf_counter() - started) * 1e3
        return Answer(request.prompt_id, tuple(ids), kind, accepted, first_ms, latency_ms)

    def _finish(self, request: Request, ids: list[int], finish: Any) -> Literal["stop", "length"]:
        kind = finish.get("type") if isinstance(finish, dict) else finish
        if kind not in ("stop", "length"):
            raise EngineError(
                "The server did not finish an answer",
                where=f"prompt {request.prompt_id}",
                expected="an end by end-of-turn token or by length",
                got=str(finish),
                do="see its log; a request must fit serve.sglang.context_tokens and max_total_tokens",
            )
        return kind

    def states(self, prompt_ids: Sequence[int], max_new_tokens: int = 1) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """States [L, F] of all prompt tokens, [m, F] of decoded ones, and the decoded ids. A greedy request.

        Raises:
            EngineError: fewer states than tokens, as a cached prefix would leave.
        """
        asked = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt_ids), "sampling_params": asked, "return_hidden_states": True}
        reply = self.client.post("/generate", body)
        prompt, decoded = rows_of(reply["meta_info"].get("hidden_states") or [])
        if len(prompt) != len(prompt_ids):
            raise EngineError(
                "The server gave other states than there are tokens",
                where=f"{self.client.url}/generate",
                expected=f"{len(prompt_ids)} states, one a prompt token",
                got=f"{len(prompt)}, {reply['meta_info'].get('cached_tokens', 0)} of the tokens came from its prefix cache",
                do="start it with --disable-radix-cache and --enable-return-hidden-states",
            )
        width = len(prompt[0])
        return torch.tensor(prompt), torch.tensor(decoded).view(-1, width), tuple(reply["output_ids"])

    def _fed(self, request: Request, answer: Answer) -> Tensor:
        """States of the request's tokens; decoded ones too when the server chose the same again."""
        prompt = request.prompt_ids[:_STATE_TOKENS]
        wanted = min(_STATE_ANSWER, len(answer.ids)) if prompt == request.prompt_ids else 1
        states, decoded, ids = self.states(prompt, wanted)
        same = next((i for i, (a, b) in enumerate(zip(ids, answer.ids, strict=False)) if a != b), len(ids))
        return torch.cat([states, decoded[: max(0, same - 1)]])


def _sampling(request: Request) -> dict[str, Any]:
    told: dict[str, Any] = {
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens,
        "ignore_eos": request.ignore_eos,
    }
    return told | ({"sampling_seed": request.seed} if request.temperature else {})


@contextmanager
def serve(
    launch: Launch, told: SGLang, *, label: str, url: str = "", by_value: bool = False
) -> Generator[Server, None, None]:
    """A server for `launch`: started and ended here, or at `url` and left as it is.

    Args:
        label: names the log file and the progress bar.
        by_value: the layers fed are going to be compared by value; see check_launch.

    Raises:
        EngineError: what check_launch refuses, a server that does not start, or settings that did not take.
    """
    if url:
        yield _attach(launch, url, by_value)
        return
    fields = launch.fields(told)
    _warn(check_launch(fields, launch.draft, positions=launch.positions, by_value=by_value))
    port = _free_port()
    client = Client(f"http://127.0.0.1:{port}", time_limit_s=_ANSWER_LIMIT_S)
    started = command(fields, told.python, port)
    process = ServerProcess(started, env=environment(launch.device, launch.threads), log=LOGS / f"{label}.log")
    try:
        process.wait_until(client.healthy, told.start_limit_s, f"sglang starts ({label})")
        info = _info(client)
        _demand_effective(launch.expected(told), info, process)
        yield Server(client, info, launch.draft_steps if launch.draft else 0)
    finally:
        process.end()


def _attach(launch: Launch, url: str, by_value: bool) -> Server:
    """A server that someone else started: its own settings are judged as a command's would be."""
    client = Client(url, time_limit_s=_ANSWER_LIMIT_S)
    info = _info(client)
    _warn(check_launch(info, launch.draft, positions=launch.positions, by_value=by_value, where=f"the server at {url}"))
    steps = info.get("speculative_num_steps") or 0
    if steps != (launch.draft_steps if launch.draft else 0):
        raise EngineError(
            "The server drafts another number of tokens than params.yaml says",
            where=f"the server at {url}",
            expected=f"speculative_num_steps {launch.draft_steps or None}",
            got=str(info.get("speculative_num_steps")),
            do="start it so, or set serve.draft_steps",
        )
    return Server(client, info, steps)


def _info(client: Client) -> dict[str, Any]:
    info = client.get("/server_info", "/get_server_info")
    if (version := str(info.get("version"))).split("+")[0] != VERSION:
        raise EngineError(
            "This is another SGLang than the one this line is made for",
            where=client.url,
            expected=f"{VERSION}: layer ids and counts mean other things in other versions",
            got=version,
            do="install that version; raise it only together with stages/capture/dialects.py and a run of gate-deployment",
        )
    return info


def _demand_effective(expected: Mapping[str, Any], info: Mapping[str, Any], process: ServerProcess) -> None:
    """Raises EngineError when a setting did not take: SGLang warns in its log and goes on without."""
    if faults := unmet(expected, info):
        raise EngineError(
            "SGLang runs with other settings than it was started with",
            where=str(process.log),
            expected="every setting in effect",
            got="\n    " + "\n    ".join(faults),
            do="read the log for its reason; on a CPU `make sglang` installs what intel_amx needs",
        )


def demand_alike(one: Server, other_info: Mapping[str, Any]) -> None:
    """Raises EngineError when two servers differ in a setting that answers depend on."""
    if faults := differing(one.info, other_info, ALIKE):
        raise EngineError(
            "The servers with and without a draft are not started alike",
            where="serve.sglang.url and plain_url",
            expected="equal settings but for speculation",
            got="; ".join(faults),
            do="start both with the same flags",
        )


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
