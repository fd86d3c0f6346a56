"""Talking to a server over HTTP: plain JSON, and answers token by token as server-sent events."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from stages.contracts.errors import EngineError

_QUICK_S = 5.0
_LOST = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


class Client:
    """One server. Proxies are not asked: it stands on this machine, or at the address that was given."""

    def __init__(self, url: str, *, time_limit_s: float) -> None:
        self.url, self.time_limit_s = url.rstrip("/"), time_limit_s
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def healthy(self) -> bool:
        """Whether it answers and says that it is ready."""
        try:
            with self._open(f"{self.url}/health", timeout=_QUICK_S) as reply:
                return reply.status == 200
        except _LOST:
            return False

    def get(self, *paths: str) -> Any:
        """The JSON at the first of `paths` there is: names change between versions.

        Raises:
            EngineError: the server cannot be reached, or has none of them.
        """
        for path in paths[:-1]:
            try:
                return self._json(path, None)
            except EngineError as error:
                if "404" not in error.got:
                    raise
        return self._json(paths[-1], None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to `body`.

        Raises:
            EngineError: the server cannot be reached or refuses; its own words are told.
        """
        return self._json(path, body)

    def order(self, path: str) -> None:
        """Ask for something whose answer is only that it was done.

        Raises:
            EngineError: as `post`.
        """
        with self._request(path, {}) as reply:
            reply.read()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer, each as it comes.

        Raises:
            EngineError: as `post`, or an event that reports an error.
        """
        with self._request(path, body) as reply:
            for line in reply:
                told = line.decode(errors="replace").strip()
                if not told.startswith("data:") or told == "data: [DONE]":
                    continue
                event = self._event(path, told.removeprefix("data:"))
                if "error" in event:
                    raise self._refused(path, str(event["error"]))
                yield event

    def _event(self, path: str, said: str) -> dict[str, Any]:
        try:
            return json.loads(said)
        except ValueError as error:
            raise self._refused(path, f"an event that is no JSON: {said[:200]}") from error

    def _json(self, path: str, body: dict[str, Any] | None) -> Any:
        with self._request(path, body) as reply:
            try:
                return json.load(reply)
            except ValueError as error:
                raise self._refused(path, f"no JSON: {error}") from error

    @contextmanager
    def _request(self, path: str, body: dict[str, Any] | None) -> Generator[http.client.HTTPResponse, None, None]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        try:
            with self._open(asked, timeout=self.time_limit_s) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise self._refused(path, f"HTTP {error.code}: {said}") from error
        except _LOST as error:
            raise EngineError(
                "The server cannot be reached",
                where=f"{self.url}{path}",
                expected=f"an answer within {self.time_limit_s:g} s",
                got=str(error),
                do="look at its log for why it went away or hangs",
            ) from error

    def _refused(self, path: str, said: str) -> EngineError:
        return EngineError(
            "The server refused what was asked of it",
            where=f"{self.url}{path}",
            got=said,
            do="its log says more; a request must fit serve.sglang.context_tokens and max_total_tokens",
        )
