"""The weekly retrain: going on from the draft of last week against starting from the target, with equal CPU time.

    python -m benchmarks.warm_start

Needs a merged set (`dvc repro gate-training`); changes nothing. Four of five training rows are last week's: a draft is
trained on them for FIRST optimizer steps. Then all rows are there, and two drafts get THEN steps on the same batches, so
equal work (the CPU seconds stand beside it): one that goes on from last week's, its vocabulary kept, and one that starts from the target. Both are simulated on the held-out rows, which
neither has seen. Fails when going on is not better.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING

import torch

from stages._train_judge import evaluate
from stages._train_rows import Rows, read_rows, read_vocabulary
from stages.acceptance.lengths import gain
from stages.capture.store import RowStore
from stages.contracts.manifest import HIDDEN_STATES, MERGED_MANIFEST, MergedManifest
from stages.contracts.params import Params, load_params
from stages.drafts.eagle3 import BatchOrder, Eagle3, HeldOut, Teacher, Trainer, carry_over, match_scales, start_draft
from stages.targets import load_target, locate_target
from stages.train import SCALED_BY, schedule_of, target_ids

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

NEW = 5  # every fifth row of the index is new: all sources have some
FIRST, THEN = 240, 96  # optimizer steps of last week's draft, and of each of this week's two


def fresh(target: Decoder, ids: torch.Tensor, rows: Rows, params: Params) -> tuple[Eagle3, Teacher]:
    """A draft as training from the target starts it."""
    names = ("heads", "kv_heads", "head_dim", "intermediate_size", "seed", "norms", "head", "loss", "products")
    draft, teacher = start_draft(target, ids, **{n: getattr(params.train, n) for n in names})
    if params.train.norms:
        match_scales(draft, rows.pack(rows.train[:SCALED_BY]).aux)
    return draft, teacher


def train(draft: Eagle3, teacher: Teacher, rows: Rows, params: Params, steps: int, seed: int) -> tuple[Eagle3, float]:
    """`draft` after a whole schedule of `steps` on `rows`, averaged; the CPU seconds that took."""
    schedule = dataclasses.replace(schedule_of(params), optimizer_steps=steps)
    trainer = Trainer(draft, teacher, schedule)
    order = BatchOrder([row.length for row in rows.train], params.train.batch_tokens, seed)
    started = time.process_time()
    for step in range(steps):
        trainer.train(rows.pack([rows.train[i] for i in order(step)]))
    return trainer.averaged(), time.process_time() - started


def told(name: str, found: HeldOut, seconds: float, steps: int) -> None:
    here = found.overall
    print(
        f"{name}: accept length {here.accept_length:.3f} ({here.low:.3f} to {here.high:.3f}), held-out loss {found.loss:.3f}; "
        f"{steps} steps, {seconds:.0f} CPU-s",
        flush=True,
    )


def main() -> None:
    params, merged = load_params(), MergedManifest.read(MERGED_MANIFEST)
    torch.set_num_threads(params.target.threads)
    target = load_target(locate_target(params.target.origin), params.target.device, stored=True)
    ids = target_ids(read_vocabulary(merged)[0])
    rows = read_rows(RowStore(HIDDEN_STATES), target.device)
    old = dataclasses.replace(rows, train=tuple(r for i, r in enumerate(rows.train, 1) if i % NEW))
    print(
        f"{len(old.train)} rows of last week, {len(rows.train) - len(old.train)} new ones, {len(rows.held_out)} held out"
    )
    draft, teacher = fresh(target, ids, old, params)
    last_week, seconds = train(draft, teacher, old, params, FIRST, params.train.seed)
    found = {"last week": evaluate(last_week, teacher, rows, params)}
    told("last week's draft", found["last week"], seconds, FIRST)
    tensors = {n: p.detach().clone() for n, p in last_week.named_parameters()}
    for name in ("goes on", "from the target"):
        draft, _ = fresh(target, ids, rows, params)
        if name == "goes on":
            carry_over(draft, tensors, ids, ids)
        trained, seconds = train(draft, teacher, rows, params, THEN, params.train.seed + 1)
        found[name] = evaluate(trained, teacher, rows, params)
        told(name, found[name], seconds, THEN)
    more, low, high = gain(found["from the target"].by_row, found["goes on"].by_row)
    print(f"going on over starting anew, the same answers: {more:+.3f} ({low:+.3f} to {high:+.3f})")
    more_old, low_old, high_old = gain(found["last week"].by_row, found["goes on"].by_row)
    print(f"going on over last week's draft: {more_old:+.3f} ({low_old:+.3f} to {high_old:+.3f})")
    if low <= 0:
        sys.exit("going on from last week's draft is not better than starting anew")


if __name__ == "__main__":
    main()
