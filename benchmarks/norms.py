"""EAGLE-3.1's norms beside none of them: held-out accept length after the same optimizer steps on the line's own rows.

    python -m benchmarks.norms [STEPS [NORMS ...]]

Needs a merged set (`dvc repro gate-training`); changes nothing. NORMS: `plain`, or norms joined by `+` (fc_norm+norm_output);
all of ARMS unless given. Each arm trains on one thread with the settings of params.yaml, the schedule fitted to STEPS (480
unless given), and its averaged weights are simulated on all held-out rows. One seed, that of params.yaml.
"""

from __future__ import annotations

import sys
import time

import torch

from stages._train_judge import evaluate
from stages.contracts.params import load_params
from stages.contracts.progress import progress
from stages.drafts.eagle3 import BatchOrder, Trainer
from stages.train import read_inputs, schedule_of

STEPS, ARMS = 480, ("plain", "norm_output", "fc_norm", "fc_norm+norm_output")


def run(arm: str, steps: int) -> str:
    """Train one arm; what came of it as a line."""
    params = load_params()
    norms = () if arm == "plain" else tuple(arm.split("+"))
    told = params.train.model_validate({**params.train.model_dump(), "norms": norms, "optimizer_steps": steps})
    params = params.model_copy(update={"train": told})
    inputs = read_inputs(params, "cpu")
    rows, trainer = inputs.rows, Trainer(inputs.draft, inputs.teacher, schedule_of(params))
    order = BatchOrder([row.length for row in rows.train], told.batch_tokens, told.seed)
    started = time.process_time()
    with progress(steps, arm, "steps") as advance:
        for step in range(steps):
            trainer.train(rows.pack([rows.train[i] for i in order(step)]))
            advance(1)
    spent = time.process_time() - started
    found = evaluate(trainer.averaged(), inputs.teacher, rows, params)
    g = found.overall
    positions = " ".join(f"{value:.3f}" for value in g.by_position)
    return (
        f"{arm:22s}accept length {g.accept_length:.3f} ({g.low:.3f} to {g.high:.3f})  by position {positions}  "
        f"held-out loss {found.loss:.3f}  {spent:.0f} CPU-s"
    )


def main() -> None:
    torch.set_num_threads(1)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    for arm in sys.argv[2:] or ARMS:
        print(run(arm, steps), flush=True)


if __name__ == "__main__":
    main()
