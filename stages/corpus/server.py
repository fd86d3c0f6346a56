"""A server's answers: any server with OpenAI's completions that serves the target (SGLang, vLLM), many requests at once.

Prompts go out as token ids and come back as token ids (`return_token_ids`, which SGLang and vLLM both know), so what is
learnt is what was sampled. No more than `concurrency` requests are under way, and none is prepared before a place is
free. What fails in passing is asked again with growing waits, and all wait when the server says when to come back.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from stages.contracts.errors import EngineError
from stages.corpus.answers import Bounds, Generated, OnAnswer, Prompt

KEY_VARIABLE = "DRAFTLINE_API_KEY"
FIRST_WAIT_S, LONGEST_WAIT_S, LONGEST_RETRY_AFTER_S = 0.5, 30.0, 300.0
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
_SYSTEMATIC = {401: "the key in " + KEY_VARIABLE, 403: "the key in " + KEY_VARIABLE, 404: "base_url and model"}
_WORDS = {"failed": "The server answers nothing any more", "refused": "The server refuses every prompt"}
_PATIENCE = {"failed": 0, "refused": 16}  # prompts in a row beyond those under way at once
_SHOWN = 300  # characters of a server's words
_NO_ADDRESS = (httpx.InvalidURL, UnicodeError)  # what httpx raises at one; neither is an HTTPError


class _Passing(Exception):
    """A request that may succeed when it is sent again, after `wait_s` when the server said so."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        self.why, self.wait_s = why, wait_s
        super().__init__(why)


@dataclass
class ServerAnswers:
    """An Answerer. `encode` turns text into ids where the server tells none; `end_id` ends a turn whose end it left out.

    Attributes:
        end_ids: ids that end a turn.
        vocab_size: of the target; ids beyond it are no answer.
        may_retokenise: prepare.answers.token_ids is `retokenise`.
    """

    base_url: str
    model: str
    concurrency: int
    timeout_s: float
    retries: int
    max_new_tokens: int
    temperature: float
    seed: int
    end_ids: frozenset[int]
    end_id: int
    vocab_size: int
    may_retokenise: bool
    encode: Callable[[str], Sequence[int]]
    _not_before: float = field(default=0.0, init=False)
    _in_a_row: dict[str, int] = field(default_factory=dict, init=False)

    def __call__(self, prompts: Sequence[Prompt], on_answer: OnAnswer) -> None:
        """Ask for all prompts and report each answer as it comes.

        Raises:
            EngineError: what no further request would mend: a wrong address, key or model, a server that reads other tokens
                than it is sent or tells none, or one that answers nothing any more.
        """
        try:
            asyncio.run(self._all(prompts, on_answer))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _all(self, prompts: Sequence[Prompt], on_answer: OnAnswer) -> None:
        waiting = iter(prompts)
        workers = min(self.concurrency, len(prompts))
        limits = httpx.Limits(max_connections=workers, max_keepalive_connections=workers)
        async with httpx.AsyncClient(headers=_headers(), limits=limits, timeout=self.timeout_s) as client:

            async def work() -> None:
                for prompt, ids in waiting:
                    answer = await self._ask(client, prompt, ids)
                    self._note(answer)
                    on_answer(prompt, answer.ids, answer.finish, answer.detail)

            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())

    def _note(self, answer: Generated) -> None:
        """Raises EngineError when more prompts in a row failed, or were refused, than are under way at once: the server is
        gone, or will take none of them."""
        count = self._in_a_row.get(answer.finish, 0) + 1
        self._in_a_row = {answer.finish: count} if answer.finish in _WORDS else {}
        if answer.finish in _WORDS and count > self.concurrency + _PATIENCE[answer.finish]:
            raise EngineError(
                _WORDS[answer.finish],
                where=self.base_url,
                expected="an answer now and then",
                got=f"{count} prompts in a row without one, the last: {answer.detail}",
                do="mend the server or its settings, then run this again; answers that are there are kept",
            )

    async def _ask(self, client: httpx.AsyncClient, prompt: str, ids: tuple[int, ...]) -> Generated:
        """An answer, or why there is none after every retry."""
        why = ""
        for attempt in range(self.retries + 1):
            await asyncio.sleep(max(self._not_before - time.monotonic(), 0))
            try:
                return await self._once(client, prompt, ids)
            except _Passing as fault:
                why = fault.why
                wait = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) * random.uniform(0.5, 1)
                if fault.wait_s is not None:
                    wait = fault.wait_s
                    self._not_before = max(self._not_before, time.monotonic() + wait)
                if attempt < self.retries:
                    await asyncio.sleep(wait)
        return Generated((), "failed", f"{why} ({self.retries + 1} times)")

    async def _once(self, client: httpx.AsyncClient, prompt: str, ids: tuple[int, ...]) -> Generated:
        try:
            async with asyncio.timeout(self.timeout_s):  # httpx' own is for each read, which a slow drip never exceeds
                response = await client.post(f"{self.base_url.rstrip('/')}/completions", json=self._body(prompt, ids))
        except TimeoutError:
            raise _Passing(f"no answer within {self.timeout_s:g} s") from None
        except _NO_ADDRESS as error:
            raise _unreached(self.base_url, error) from error
        except httpx.HTTPError as error:
            raise _Passing(_words(f"{type(error).__name__}: {error}")) from error
        if response.status_code in _PASSING:
            raise _Passing(_told(response), _retry_after(response))
        if response.status_code in _SYSTEMATIC:
            raise EngineError(
                "The server does not take these requests",
                where=f"{self.base_url}, model {self.model}",
                expected="an answer",
                got=_told(response),
                do=f"mend prepare.answers: {_SYSTEMATIC[response.status_code]}",
            )
        if response.status_code != httpx.codes.OK:
            return Generated((), "refused", _told(response))
        try:
            body = response.json()
            return self._read(ids, body, body["choices"][0])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _Passing(f"no completion: {type(error).__name__}: {_words(response.text)}") from error

    def _body(self, prompt: str, ids: tuple[int, ...]) -> dict[str, Any]:
        """All that decides the sampling is sent: servers take what is left out from the model's generation config."""
        seed = int.from_bytes(hashlib.sha256(f"{self.seed}\0{prompt}".encode()).digest()[:4], "big") >> 1
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed,
            "stop_token_ids": sorted(self.end_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def _read(self, asked: tuple[int, ...], body: dict[str, Any], choice: dict[str, Any]) -> Generated:
        finish, usage = choice["finish_reason"], body.get("usage") or {}
        if finish == "content_filter":
            return Generated((), "refused", "content_filter")
        if finish not in ("stop", "length"):
            raise _Passing(_words(f"finish_reason {finish}"))
        self._demand_prompt(asked, choice.get("prompt_token_ids") or body.get("prompt_token_ids"), usage)
        ids = choice.get("token_ids")
        if ids is None:
            self._demand_permission()
            return self._within(self._retokenised(choice, finish, usage.get("completion_tokens")))
        self._demand_ids(ids)
        return self._within(Generated(self._closed(tuple(ids), finish, choice), finish))

    def _within(self, answer: Generated) -> Generated:
        """The answer, once its ids, with the end of turn that was put back, are what they may be."""
        self._demand_ids(answer.ids)
        return answer

    def _demand_ids(self, ids: object) -> None:
        """Raises _Passing when no answer of the target to this request can have these ids."""
        if fault := Bounds(self.vocab_size, self.max_new_tokens).fault(ids):
            raise _Passing(fault)

    def _retokenised(self, choice: dict[str, Any], finish: Any, sampled: int | None) -> Generated:
        """The text's ids, when there are as many as were sampled: a text has several tokenisations."""
        ids = self._closed(tuple(self.encode(choice["text"])), finish, choice)
        if sampled is None or len(ids) != sampled:
            return Generated((), "mismatched", f"the text gives {len(ids)} tokens, {sampled} were sampled")
        return Generated(ids, finish)

    def _closed(self, ids: tuple[int, ...], finish: Any, choice: dict[str, Any]) -> tuple[int, ...]:
        """The ids, with the end of turn that some servers leave out of a stopped answer."""
        if finish == "length" or (ids and ids[-1] in self.end_ids):
            return ids
        told = choice.get("matched_stop", choice.get("stop_reason"))
        return (*ids, told if type(told) is int and told in self.end_ids else self.end_id)

    def _demand_prompt(self, asked: tuple[int, ...], read: list[int] | None, usage: dict[str, Any]) -> None:
        tokens = usage.get("prompt_tokens")
        same = tuple(read) == asked if read is not None else tokens in (None, len(asked))
        if not same:
            raise EngineError(
                "The server read another prompt than it was sent",
                where=self.base_url,
                expected=f"{len(asked)} tokens, opening with {list(asked[:6])}",
                got=_words(f"opening with {read[:6]}") if read else f"{tokens} tokens",
                do="serve it without adding or cutting tokens: no second BOS, a context as long as prepare.max_row_tokens",
            )

    def _demand_permission(self) -> None:
        if not self.may_retokenise:
            raise EngineError(
                "The server tells no token ids",
                where=self.base_url,
                expected="`token_ids` in each choice, as SGLang and vLLM give for return_token_ids",
                got="text alone, whose tokens need not be those that were sampled",
                do="serve with one that does, or set prepare.answers.token_ids: retokenise, which rejects what it cannot match",
            )


def demand_same_rendering(
    base_url: str,
    model: str,
    arguments: dict[str, Any],
    probes: Sequence[tuple[Sequence[dict[str, Any]], tuple[int, ...]]],
) -> str:
    """Have the server render conversations and compare its token ids with those prepared here; tells what came of it.

    Args:
        arguments: prepare.rendering.template_arguments.
        probes: (messages, ids that they have to become).

    Raises:
        EngineError: the server cannot be reached, or builds other tokens: its template or tokenizer is another one.
    """
    compared: list[str] = []
    why = ""
    with httpx.Client(headers=_headers(), timeout=60) as client:
        for messages, ids in probes:
            how, read = _rendered(client, base_url.rstrip("/"), {"model": model, "messages": list(messages)}, arguments)
            if read is None:
                why = how
                continue
            compared.append(how)
            if read != (list(ids) if how == "token by token" else len(ids)):
                raise EngineError(
                    "The server renders conversations otherwise than these rows were",
                    where=f"{base_url}, model {model}: {json.dumps(list(messages))[:120]}",
                    expected=f"{len(ids)} tokens {list(ids[:12])}…, by the target's own template",
                    got=f"{len(read)} tokens {read[:12]}…" if isinstance(read, list) else f"{read} tokens",
                    do="serve the folder that target.origin names, without --chat-template, and check "
                    "prepare.rendering.template_arguments",
                )
    rest = len(probes) - len(compared)
    told = [f"{len(compared)} conversations rendered as here, compared {' and '.join(sorted(set(compared)))}"]
    untold = f"{rest} conversations not compared with those rendered here, for it tells no tokens: {why}"
    return "; ".join([*(told if compared else []), *([untold] if rest else [])])


def _rendered(
    client: httpx.Client, base_url: str, asked: dict[str, Any], arguments: dict[str, Any]
) -> tuple[str, list[int] | int | None]:
    """What a server makes of messages: token ids where it has /tokenize, else their number, and how it told; or nothing,
    and what it said instead."""
    if arguments:
        asked = {**asked, "chat_template_kwargs": arguments}
    try:
        told = client.post(f"{base_url.removesuffix('/v1')}/tokenize", json=asked)
        tokens = _said(told, "tokens")
        if isinstance(tokens, list) and all(type(i) is int for i in tokens):
            return "token by token", tokens
        told = client.post(f"{base_url}/chat/completions", json={**asked, "max_tokens": 1})
    except (httpx.HTTPError, *_NO_ADDRESS) as error:
        raise _unreached(base_url, error) from error
    if type(tokens := _said(told, "usage", "prompt_tokens")) is int:
        return "by number of tokens", tokens
    return _told(told), None


def _said(response: httpx.Response, *path: str) -> Any:
    """What stands at `path` in the JSON of a reply; None where it is no such reply."""
    try:
        said = response.json() if response.status_code == httpx.codes.OK else None
    except (ValueError, RecursionError):
        return None
    for name in path:
        said = said.get(name) if isinstance(said, dict) else None
    return said


def _unreached(base_url: str, error: Exception) -> EngineError:
    return EngineError(
        "The server cannot be reached, or answers what cannot be read",
        where=base_url,
        expected="a server that serves the target",
        got=_words(f"{type(error).__name__}: {error}"),
        do="start it, or mend prepare.answers.base_url",
    )


def _key() -> str:
    """The server's key without what white space stands around it; empty when there is none.

    Raises:
        EngineError: no header can hold it. The error does not say it.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise EngineError(
            "The server's key cannot be sent",
            where=f"environment variable {KEY_VARIABLE}",
            expected="visible ASCII characters alone, as a header takes them",
            got="others among them; the key is not shown",
            do="set it to the key and nothing else",
        )
    return key


def _headers() -> dict[str, str]:
    key = _key()
    return {"Authorization": f"Bearer {key}"} if key else {}


def _words(text: str) -> str:
    """What a server or its client said, on one line and cut short, without the key, should it be in there."""
    said, key = " ".join(text.split()), _key()
    return (said.replace(key, "…") if key else said)[:_SHOWN]


def _told(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {_words(response.text)}"


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds to wait that the server asked for, as a number or as a date."""
    told = response.headers.get("retry-after", "")
    try:
        seconds = float(told)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    if math.isnan(seconds):
        return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)
