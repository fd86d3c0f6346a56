"""What a run costs when nothing changed: wall seconds of `dvc repro` and `make retrain`, median of five.

Run it after `make retrain`: python benchmarks/noop.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 5
LIMIT_S = 5.0


def once(command: list[str]) -> tuple[float, str]:
    """Wall seconds of `command` and what it printed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return took, done.stdout


def main() -> None:
    """Print a line a command; exit 1 when `make retrain` takes longer than its limit."""
    _, told = once(["dvc", "status"])
    if "up to date" not in told:
        sys.exit(f"the line is not up to date, so this would time a run:\n{told}")
    medians: dict[str, float] = {}
    for command in (["dvc", "repro"], ["make", "retrain"]):
        once(command)  # warms the file cache and the bytecode
        seconds = [once(command)[0] for _ in range(REPEATS)]
        name = " ".join(command)
        medians[name] = statistics.median(seconds)
        spread = f"{min(seconds):.2f}..{max(seconds):.2f}"
        print(f"no-op {name}: median {medians[name]:.2f} s of {REPEATS} ({spread})")
    sys.exit(medians["make retrain"] > LIMIT_S)


if __name__ == "__main__":
    main()
