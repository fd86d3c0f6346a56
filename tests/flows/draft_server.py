"""A server process that speaks as much of SGLang's HTTP as a canary asks: /health and /generate. Its answers are as good as the
draft it was started with says: weights `at 1.6` are served at an accept length of 1.6, `silent` never becomes healthy.

    python draft_server.py PORT    the draft is $DRAFTLINE_DRAFT; the server before on this port is ended; returns at once
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKENS = 160


class Answers(BaseHTTPRequestHandler):
    weights = ""

    def do_GET(self) -> None:
        self._reply(200 if self.path == "/health" and self.weights != "silent" else 503, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/generate" and body["input_ids"] and body["sampling_params"]["temperature"] == 0
        meta: dict[str, object] = {"completion_tokens": TOKENS}
        if self.weights.startswith("at "):
            meta["spec_verify_ct"] = round(TOKENS / float(self.weights.removeprefix("at ")))
        self._reply(200, {"output_ids": [1], "meta_info": meta})

    def _reply(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    port, pid_file = int(sys.argv[1]), Path(sys.argv[2])
    if sys.argv[3:]:
        Answers.weights = Path(os.environ["DRAFTLINE_DRAFT"], "model.safetensors").read_text()
        ThreadingHTTPServer.allow_reuse_address = True
        ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
    stop(pid_file)
    words = [sys.executable, __file__, str(port), str(pid_file), "serve"]
    with Path(os.devnull).open("wb") as nothing:
        child = subprocess.Popen(words, start_new_session=True, stdout=nothing, stderr=nothing)
    pid_file.write_text(str(child.pid))


def stop(pid_file: Path) -> None:
    """End the server that was started last, and wait until its port is free."""
    with suppress(FileNotFoundError, ProcessLookupError):
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            time.sleep(0.02)


if __name__ == "__main__":
    main()
