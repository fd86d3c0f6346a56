"""A small HTTP server with SGLang's manners, for tests of what talks to one: it reports the flags it was started with, streams
answers, hands out states, and misbehaves as `misdeeds` (a JSON file beside it) says.

Token i of an answer is the prompt's sum + i, modulo 50, and its text the letter of that place; with a draft each verification
accepts two tokens. A stop condition cuts the answer, and the counts, behind the token that meets it.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def flags(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            found[name] = True
        elif name:
            value = int(word) if word.isdigit() else word
            found[name] = (
                value
                if found[name] is True
                else [*([found[name]] if not isinstance(found[name], list) else found[name]), value]
            )
    return found


def letter(token: int) -> str:
    return chr(ord("A") + token)


def stopped(ids: list[int], sampling: dict[str, Any]) -> tuple[list[int], str, bool]:
    """The answer's tokens and text, cut where a stop condition is met."""
    text = "".join(map(letter, ids))
    for place, token in enumerate(ids):
        if token in sampling.get("stop_token_ids", ()):
            return ids[: place + 1], text[: place + 1], True
        for string in sampling.get("stop", ()):
            if string in text[: place + 1]:
                return ids[: place + 1], text[: text.index(string)], True
    return ids, text, False


class Handler(BaseHTTPRequestHandler):
    told: dict[str, Any]
    misdeeds: dict[str, Any]
    flushed = 0
    answered = 0

    def log_message(self, format: str, *args: Any) -> None: ...

    def _send(self, body: Any, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._send({})
        if self.path == "/get_server_info":
            return self._send({"version": "0.5.23"} | self.told | self.misdeeds.get("info", {}))
        return self._send({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/flush_cache":
            Handler.flushed += 1
            return self._send({"flushed": Handler.flushed})
        if code := self.misdeeds.get("status"):
            return self._send({"error": {"message": "The scheduler is gone"}}, code)
        Handler.answered += 1
        every = self.misdeeds.get("hangs_s", 0)
        time.sleep(self.misdeeds.get("first_hangs_s", every) if Handler.answered == 1 else every)
        if len(asked["input_ids"]) > self.told.get("context_length", 10**9):
            return self._send({"error": {"message": "The input is longer than the context"}}, 400)
        count = asked["sampling_params"]["max_new_tokens"]
        ids = [(sum(asked["input_ids"]) + i) % 50 for i in range(count - self.misdeeds.get("short", 0))]
        if not asked.get("stream"):
            rows = [[float(t), 1.0] for t in asked["input_ids"]][self.misdeeds.get("cached", 0) :]
            states = [rows, *([float(t), 2.0] for t in ids[:-1])]
            return self._send(
                {
                    "output_ids": ids,
                    "meta_info": {"hidden_states": states, "cached_tokens": self.misdeeds.get("cached", 0)},
                }
            )
        ids, text, matched = stopped(ids, asked["sampling_params"])
        self.send_response(200)
        self.end_headers()
        self._stream(ids, text, "stop" if matched else "length")

    def _stream(self, ids: list[int], text: str, finish: str) -> int | None:
        step = 3 if self.told.get("speculative_num_steps") else 1
        verified = 0
        for end in [1, *range(1 + step, len(ids) + step, step)][: None if len(ids) > 1 else 1]:
            done, verified = min(end, len(ids)), verified + (step == 3 and end > 1)
            if done > self.misdeeds.get("cut_after", done):
                return None
            meta: dict[str, Any] = {
                "completion_tokens": done + self.misdeeds.get("miscounts", 0),
                "finish_reason": None,
            }
            meta["cached_tokens"] = self.misdeeds.get("cached", 0)
            if done == len(ids) and verified and not self.misdeeds.get("inert"):
                kept = self.misdeeds.get("histogram", [0, 0, verified])
                meta |= {"spec_verify_ct": verified, "spec_correct_drafts_histogram": kept}
            if done == len(ids):
                meta["finish_reason"] = {"type": self.misdeeds.get("finish", finish)}
            said = json.dumps({"output_ids": ids[:done], "text": text[:done], "meta_info": meta})
            self.wfile.write(f"data: {said[: self.misdeeds.get('garbles', len(said))]}\n\n".encode())
        return self.wfile.write(b"data: [DONE]\n\n")


def main() -> None:
    Handler.told = flags(sys.argv[1:])
    path = Path(__file__).with_name("misdeeds")
    Handler.misdeeds = json.loads(path.read_text()) if path.exists() else {}
    ThreadingHTTPServer(("127.0.0.1", Handler.told["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main()
