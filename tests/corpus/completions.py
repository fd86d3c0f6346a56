"""A real HTTP server with OpenAI's completions: the in-process engine over the tiny target, and faults where a test wants them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stages.corpus.rendering import Renderer
from stages.engines.in_process import InProcess, Request
from stages.targets import load_target
from tests.corpus.families import policy

Reply = tuple[int, dict[str, str], Any]
Fault = Callable[[int, list[int]], "Reply | str | None"]


@dataclass
class Completions:
    """asked: prompts in the order of their requests. most: of requests under way at once. keys: Authorization headers.

    Attributes:
        fault: by a request's number and prompt: a reply in its place, "cut" (half an answer, then nothing) or seconds to
            wait first, as text; None for none.
        change: what becomes of a completion before it is sent.
        tokenized, chatted: replies to /tokenize (None: the renderer's own) and to chat completions.
    """

    folder: Path
    fault: Fault = lambda number, prompt: None
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
    asked: list[tuple[int, ...]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    tokenized: Reply | None = None
    chatted: Reply = (404, {}, {})
    most: int = 0
    url: str = ""
    renderer: Any = None
    _under_way: int = 0
    _lock: Any = field(default_factory=threading.Lock)
    _one: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.renderer = self.renderer or Renderer(self.folder, policy())
        self._engine = InProcess(load_target(self.folder), slots=1, positions=512)

    def answer(self, told: dict[str, Any]) -> Reply | str:
        with self._lock:
            number = len(self.asked)
            self.asked.append(tuple(told["prompt"]))
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        try:
            wanted = self.fault(number, told["prompt"])
            if isinstance(wanted, str) and wanted != "cut":
                time.sleep(float(wanted))
            elif wanted is not None:
                return wanted
            return 200, {}, self.change(self._completion(told))
        finally:
            with self._lock:
                self._under_way -= 1

    def _completion(self, told: dict[str, Any]) -> dict[str, Any]:
        ids = tuple(told["prompt"])
        request = Request("p", ids, told["max_tokens"], told["temperature"], told["seed"])
        with self._one:
            (answer,) = self._engine.generate([request], concurrency=1)
        end = answer.finish == "stop"
        text = self.renderer._template.tokenizer.decode(answer.ids[:-1] if end else answer.ids)
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": answer.finish,
            "matched_stop": answer.ids[-1] if end else None,
        }
        if told.get("return_token_ids"):
            choice |= {"token_ids": list(answer.ids), "prompt_token_ids": list(ids)}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(answer.ids)}}

    def tokenize(self, told: dict[str, Any]) -> Reply:
        return self.tokenized or (200, {}, {"tokens": list(self.renderer.prompt(told["messages"]))})


@contextmanager
def serve(server: Completions) -> Iterator[Completions]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.keys.append(self.headers.get("Authorization"))
            if self.path == "/v1/completions":
                reply = server.answer(told)
            else:
                reply = server.tokenize(told) if self.path == "/tokenize" else server.chatted
            if isinstance(reply, str):
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [{"tex')
                self.wfile.flush()
                self.close_connection = True
                return
            status, headers, body = reply
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # clients that are killed or give up waiting are what the tests are about

    http = Quiet(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
