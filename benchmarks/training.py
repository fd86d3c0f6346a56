"""Training speed and memory beside SpecForge and speculators: the same rows, draft sizes and vocabulary.

    python -m benchmarks.training

Needs a merged set (`dvc repro gate-training`); changes nothing. The peers' own EAGLE-3 classes are run where `make peers`
put them, or below the folder that DRAFTLINE_PEERS names; where they are not, that is said. Tokens are those of the rows trained on, prompts
included, the same for all. Each trainer runs in a process of its own on two threads, SECONDS of CPU after a warm-up; threads
that wait for each other sleep (GOMP_SPINCOUNT), so that CPU seconds are work done. Beside ours stands the
floor: the products that a step cannot do without, at the rate that such products reach here. Fails when a goal is missed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_peers import PEERS, absent
from benchmarks.training_rows import Inputs, prepare
from stages.drafts._start import products_dtype

SECONDS = 8.0
CASES = {"3 steps": (3, 0), "7 steps": (7, 0), "rows of 2048, 3 steps": (3, 2048)}
OURS = ("ours", "ours-trained", "ours-bfloat16")  # a frozen head, a trained one, products in bfloat16
GOALS = {
    "3 steps": 5.0,
    "7 steps": 4.0,
    "rows of 2048, 3 steps": 4.0,
}  # times either peer, in float32 and with our products; ours as the line sets it


def ask(folder: Path, arm: str, steps: int, row_tokens: int) -> dict[str, Any]:
    """What a trainer measured in a process of its own."""
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.training_arm", str(folder), arm, str(steps), str(row_tokens), str(SECONDS)],
        env=os.environ | {"GOMP_SPINCOUNT": "0"},
        capture_output=True,
        text=True,
    )
    if told.returncode:
        sys.exit(f"{arm}: {told.stderr[-2000:]}")
    found = json.loads(told.stdout.splitlines()[-1])
    return found | {"rate": found["tokens"] / found["cpu_s"]}


def default_arm() -> str:
    """Which of ours the line's own settings make of this machine."""
    low = products_dtype("auto", torch.device("cpu")) == torch.bfloat16
    return "ours-bfloat16" if low else "ours"


def show(arm: str, found: dict[str, Any]) -> None:
    line = f"  {arm:18s}{found['rate']:7.0f} tokens/CPU-s  {found['tokens'] / found['wall_s']:7.0f} tokens/s"
    line += f"  {found['peak_mb']:6.0f} MB"
    if "products_flop" in found:
        needed = found["products_flop"] / found["flop_per_cpu_s"]
        line += f"  {found['products_flop'] / found['tokens'] / 1e6:4.0f} MFLOP a token"
        line += f"  {found['cpu_s'] / needed:5.2f} x the floor at {found['flop_per_cpu_s'] / 1e9:.0f} GFLOP/CPU-s; "
        line += ", ".join(f"{kind} {share:.0%}" for kind, share in found["shares"].items())
    print(line, flush=True)


def main() -> None:
    folder, missed = prepare(), []
    inputs = Inputs(folder)
    print(f"{len(inputs.lengths)} rows, {sum(inputs.lengths)} tokens, {sum(inputs.tensor('mask').tolist())} supervised")
    products = default_arm().removeprefix("ours")
    there = [name for name in PEERS if not (why := absent(name)) or print(why)]
    present = [arm for name in there for arm in dict.fromkeys((name, name + products))]
    for case, (steps, row_tokens) in CASES.items():
        print(case)
        found: dict[str, dict[str, Any]] = {}
        for arm in (*OURS, *present):
            found[arm] = ask(folder, arm, steps, row_tokens)
            show(arm, found[arm])
        for name in present:
            times = {arm: found[arm]["rate"] / found[name]["rate"] for arm in OURS}
            print(f"  times {name}: " + ", ".join(f"{arm} {t:.1f}" for arm, t in times.items()))
            best = default_arm()
            if times[best] < GOALS[case] or found[best]["peak_mb"] >= found[name]["peak_mb"]:
                missed.append(f"{case}, {name}: {times[best]:.1f} times, goal {GOALS[case]:.0f}, or no less memory")
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
