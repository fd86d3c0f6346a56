"""What a run costs when nothing changed: wall seconds of a bare `dvc repro`, of `make retrain`, and of the retrain flow under a
Prefect server that is up, turn by turn in one run; medians, and what each takes more than `dvc repro`.

Run it after `make retrain`: python -m benchmarks.noop
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 5
LIMIT_S = 5.0  # of `make retrain`
_UP_S = 120.0
BARE = "dvc repro"
COMMANDS = {
    BARE: ["dvc", "repro"],
    "make retrain": ["make", "retrain"],
    "the retrain flow": [sys.executable, "-c", "from flows.retrain import retrain; retrain(promote=False)"],
}


def once(command: list[str], more: dict[str, str]) -> tuple[float, str]:
    """Wall seconds of `command` and what it printed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | more
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return took, done.stdout


@contextmanager
def prefect() -> Iterator[dict[str, str]]:
    """A Prefect server on SQLite in a folder of its own; gives the environment that names it."""
    with tempfile.TemporaryDirectory() as home, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        told = {"PREFECT_HOME": home, "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
        told |= {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
        words = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port]
        server = subprocess.Popen(
            words, env=os.environ | told, cwd=home, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )  # fmt: skip
        try:
            _wait(told["PREFECT_API_URL"] + "/health", server)
            yield told
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _UP_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if time.monotonic() > deadline or server.poll() is not None:
                sys.exit(f"the Prefect server did not come up within {_UP_S:.0f} s")
        time.sleep(0.2)


def main() -> None:
    """Print a line a command; exit 1 when `make retrain` takes longer than its limit."""
    _, told = once(["dvc", "status"], {})
    if "up to date" not in told:
        sys.exit(f"the line is not up to date, so this would time a run:\n{told}")
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with prefect() as more:
        for turn in range(REPEATS + 1):
            for name, command in COMMANDS.items():
                took, _ = once(command, more)
                seconds[name] += [took] if turn else []  # the first turn warms the file cache and the bytecode
    bare = statistics.median(seconds[BARE])
    for name, these in seconds.items():
        median = statistics.median(these)
        beyond = "" if name == BARE else f"; {median - bare:+.2f} s, {median / bare:.2f} x {BARE}"
        print(f"no-op {name}: median {median:.2f} s of {REPEATS} ({min(these):.2f}..{max(these):.2f}){beyond}")
    sys.exit(statistics.median(seconds["make retrain"]) > LIMIT_S)


if __name__ == "__main__":
    main()
