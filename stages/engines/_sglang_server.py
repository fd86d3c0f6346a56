"""A server that answers: requests over HTTP, each token as it comes, closed loop or at times of their own; states; its cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

import torch
from torch import Tensor

from stages.contracts.errors import EngineError
from stages.engines._requests import Answer, Request
from stages.engines._sglang_answers import Mark, accepted_counts, mark_of, rows_of
from stages.engines._sglang_http import Client

_STATE_TOKENS = 512  # of a prompt whose states are asked for: they travel as text
_STATE_ANSWER = 8  # decoded tokens whose states are asked for too


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
        arrivals: Sequence[float] = (),
    ) -> list[Answer]:
        """Answer all requests, at most `concurrency` at once; answers come in the requests' order.

        Args:
            arrivals: seconds from now at which each request is sent, whatever else is under way; `concurrency` then counts
                for nothing. Empty: as soon as a place is free.
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
        pool = ThreadPoolExecutor(len(waiting) if arrivals and waiting else concurrency)
        now = time.perf_counter()
        due = [now + at for at in arrivals] or [0.0] * len(waiting)
        try:
            futures = [pool.submit(self._answer, *pair) for pair in zip(waiting, due, strict=True)]
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

    def _answer(self, request: Request, due: float = 0.0) -> Answer:
        """Times count from the moment the request was due, if it was: a client that is late would else hide the wait."""
        time.sleep(max(0.0, due - time.perf_counter()))
        sent = time.perf_counter()
        started = due or sent
        body = {"input_ids": list(request.prompt_ids), "sampling_params": _sampling(request), "stream": True}
        marks: list[Mark] = []
        ids: list[int] = []
        first_ms, finish, text, cached = 0.0, None, "", 0
        for event in self.client.stream("/generate", body):
            first_ms = first_ms or (time.perf_counter() - started) * 1e3
            meta, told = event["meta_info"], event.get("output_ids") or []
            ids = ids + told if self._incremental else told
            text = text + event.get("text", "") if self._incremental else event.get("text", "")
            cached = int(meta.get("cached_tokens") or cached)
            marks.append(mark_of(meta))
            finish = meta.get("finish_reason") or finish
        kind = self._finish(request, ids, finish)
        if marks[-1].tokens != len(ids):
            raise EngineError(
                "The server counts other tokens than it sent",
                where=f"prompt {request.prompt_id}",
                expected=f"completion_tokens {len(ids)}, as many as came",
                got=str(marks[-1].tokens),
                do="a part of the stream was lost; look at the server's log",
            )
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
        late_ms = (sent - started) * 1e3
        return Answer(request.prompt_id, tuple(ids), kind, accepted, first_ms, latency_ms, text, cached, late_ms)

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

    @property
    def caches_prefixes(self) -> bool:
        return not self.info.get("disable_radix_cache")

    def forget(self) -> None:
        """Empty the prefix cache.

        Raises:
            EngineError: the server refuses, as it does while requests are under way.
        """
        self.client.order("/flush_cache")

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
    told |= {"sampling_seed": request.seed} if request.temperature else {}
    told |= {"stop_token_ids": list(request.stop_ids)} if request.stop_ids else {}
    return told | ({"stop": list(request.stop)} if request.stop else {})
