"""A real PostgreSQL for the tests: its own cluster in a folder of its own, gone afterwards."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.flows.s3 import free_ports

_UP_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """A server that listens on loopback, and what its programs need to be told."""

    programs: Path
    port: int
    password: str
    log: Path

    @property
    def url(self) -> str:
        """As Prefect takes it."""
        return f"postgresql+asyncpg://draftline:{self.password}@127.0.0.1:{self.port}/postgres"

    def ask(self, query: str) -> str:
        """What the server itself answers."""
        words = [self.programs / "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "draftline", "-d", "postgres", "-Atc"]  # fmt: skip
        env = os.environ | {"PGPASSWORD": self.password}
        done = subprocess.run([*words, query], env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()


def programs() -> Path:
    """The folder of initdb and postgres; Debian keeps them outside PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    named = found[-1] if found else shutil.which("initdb")
    if named is None:
        pytest.skip("no PostgreSQL on this machine: apt-get install postgresql")
    return Path(named).resolve().parent


def _as_whom() -> dict[str, Any]:
    """PostgreSQL refuses to run as root, so root runs it as nobody."""
    return {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}


@contextmanager
def postgres() -> Iterator[Cluster]:
    """A server with a user `draftline` who has a password; skips in words where PostgreSQL is not installed."""
    where, whom = programs(), _as_whom()
    folder = Path(tempfile.mkdtemp(prefix="draftline-postgres-"))  # the folders of pytest are closed to other users
    password = secrets.token_hex(16)
    secret = folder / "password"
    secret.write_text(password)
    if whom:
        for path in (folder, secret):
            shutil.chown(path, whom["user"], whom["group"])
    made = subprocess.run(
        [where / "initdb", "-D", folder / "data", "-U", "draftline", "--auth=scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--no-sync"],
        cwd=folder, capture_output=True, text=True, **whom,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    secret.unlink()
    cluster = Cluster(where, free_ports(1)[0], password, folder.parent / f"{folder.name}.log")
    settings = {"listen_addresses": "127.0.0.1", "port": cluster.port, "unix_socket_directories": "", "fsync": "off"}
    told = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    with cluster.log.open("wb") as log:
        server = subprocess.Popen(
            [where / "postgres", "-D", folder / "data", *told],
            cwd=folder, stdout=log, stderr=log, start_new_session=True, **whom,
        )  # fmt: skip
    try:
        _wait(cluster, server)
        yield cluster
    finally:
        server.send_signal(signal.SIGQUIT)  # at once; nothing of it is kept
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
        cluster.log.unlink(missing_ok=True)


def _wait(cluster: Cluster, server: subprocess.Popen[Any]) -> None:
    ready = [cluster.programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(cluster.port)]
    deadline = time.monotonic() + _UP_S
    while subprocess.run(ready).returncode:
        assert time.monotonic() < deadline and server.poll() is None, cluster.log.read_text(errors="replace")[-3000:]
        time.sleep(0.1)
