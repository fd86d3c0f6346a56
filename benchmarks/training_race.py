"""Accept length after equal CPU time: our trainer and its peers on the same rows, judged by the same simulation.

    python -m benchmarks.training_race CPU_SECONDS [ARM ...]

Needs a merged set (`dvc repro gate-training`). Every arm trains on the rows of `training_rows` for CPU_SECONDS on one thread
(a warm-up of 4 % and a cosine to zero over the time, the same peak for all), then its draft is simulated on all held-out rows.
A finished arm is kept in .cache/benchmarks/training and not run again; an arm cut short starts anew. Arms are named
<trainer>-<seed>, with the trainers of `benchmarks.training_arm`; without a name three seeds of ours and one of each peer are
run, all with bfloat16 products where the line itself would take them here.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.training import default_arm
from benchmarks.training_peers import PEERS, absent
from benchmarks.training_rows import Inputs, prepare
from stages._train_judge import evaluate
from stages._train_rows import read_rows
from stages.capture.store import RowStore
from stages.contracts.files import canonical, write_whole
from stages.contracts.manifest import HIDDEN_STATES
from stages.contracts.params import load_params
from stages.contracts.progress import progress
from stages.drafts.eagle3 import BatchOrder, Eagle3, Teacher

STEPS, BATCH_TOKENS, RATE, WARMUP = 3, 1024, 0.0015, 0.04
FREE_STEPS = 4  # at the start, not counted: SpecForge compiles parts of itself


def all_arms() -> list[str]:
    """The arms of a whole race on this machine."""
    ours = default_arm()
    return [f"{ours}-{seed}" for seed in (1, 2, 3)] + [f"{peer}{ours.removeprefix('ours')}-1" for peer in PEERS]


def rate_at(share: float) -> float:
    """Learning rate when this share of the time is spent."""
    if share < WARMUP:
        return RATE * (share + 0.002) / WARMUP
    return RATE * 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARMUP) / (1 - WARMUP))))


def race(folder: Path, name: str, seed: int, budget_s: float) -> dict[str, Any]:
    """Train and judge one arm."""
    from benchmarks.training_arm import make_arm

    torch.set_num_threads(1)
    inputs = Inputs(folder)
    arm = make_arm(name, inputs, STEPS, seed)
    order = BatchOrder(inputs.lengths, BATCH_TOKENS, seed)
    tokens, number, spent = 0, 0, 0.0
    with progress(int(budget_s), f"{name}-{seed}", "CPU-s") as advance:
        while spent < budget_s:
            started = time.process_time()
            batch = inputs.pack(order(number))
            arm.step(batch, rate_at(spent / budget_s))
            took = time.process_time() - started
            advance(0 if number < FREE_STEPS else int(spent + took) - int(spent))
            number, tokens = number + 1, tokens + len(batch.input_ids)
            spent += took if number > FREE_STEPS else 0.0
    return {"tokens": tokens, "optimizer_steps": number, "cpu_s": round(spent, 1)} | judged(inputs, arm.weights())


@torch.no_grad()
def judged(inputs: Inputs, weights: dict[str, Any]) -> dict[str, Any]:
    """Held-out accept length of a draft with these weights."""
    c, params = inputs.config, load_params()
    ids = inputs.tensor("d2t") + torch.arange(c.draft_vocab_size)
    teacher = Teacher(inputs.tensor("norm"), inputs.tensor("head")[ids].clone(), c.eps, ids, c.vocab_size)
    draft = Eagle3(c, inputs.tensor("embedding"))
    draft.load_state_dict(weights)
    rows = read_rows(RowStore(HIDDEN_STATES), torch.device("cpu"))
    found = evaluate(draft.requires_grad_(False), teacher, rows, params)
    domains = {name: round(a.accept_length, 4) for name, a in found.by_domain.items()}
    return {"accept_length": round(found.overall.accept_length, 4), "held_out_loss": round(found.loss, 4)} | domains


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name:24s}" + "  ".join(f"{key} {value}" for key, value in found.items()), flush=True)


def main() -> None:
    folder = prepare()
    if sys.argv[1] == "--child":
        _, _, budget, arm, to = sys.argv
        name, _, seed = arm.rpartition("-")
        write_whole(Path(to), canonical(race(folder, name, int(seed), float(budget))))
        return
    budget = str(int(sys.argv[1]))
    kept = folder.parent / f"race-{folder.name}-{budget}"
    kept.mkdir(exist_ok=True)
    for arm in sys.argv[2:] or all_arms():
        name, to = arm.rpartition("-")[0], kept / f"{arm}.json"
        if (peer := name.split("-")[0]) in PEERS and not to.exists() and (why := absent(peer)):
            print(why)
            continue
        if not to.exists():
            subprocess.run(
                [sys.executable, "-m", "benchmarks.training_race", "--child", budget, arm, str(to)], check=True
            )
        show(arm, json.loads(to.read_bytes()))


if __name__ == "__main__":
    main()
