"""What bfloat16 files cost in accept length: the draft's weights rounded, simulated on the same held-out rows.

    python -m benchmarks.rounded

Needs a draft and its merged set (`dvc repro train`); changes nothing. Fails when the loss of accept length is beyond chance
(the interval of the difference over the same answers lies below nothing).
"""

from __future__ import annotations

import sys

import torch

from stages._train_judge import evaluate
from stages._train_rows import read_rows, read_vocabulary
from stages.acceptance.lengths import gain
from stages.capture.store import RowStore
from stages.contracts.draft import DRAFT
from stages.contracts.manifest import HIDDEN_STATES, MERGED_MANIFEST, MergedManifest
from stages.contracts.params import load_params
from stages.drafts.eagle3 import HeldOut, read_draft, start_draft
from stages.targets import load_target, locate_target
from stages.train import as_exported, target_ids


def told(name: str, found: HeldOut) -> None:
    parts = {"overall": found.overall, **found.by_domain}
    said = ", ".join(f"{n} {a.accept_length:.4f} ({a.low:.3f} to {a.high:.3f})" for n, a in parts.items())
    print(f"{name}: {said}; held-out loss {found.loss:.5f}", flush=True)


def main() -> None:
    params, merged = load_params(), MergedManifest.read(MERGED_MANIFEST)
    torch.set_num_threads(params.target.threads)
    target = load_target(locate_target(params.target.origin), params.target.device, stored=True)
    names = ("heads", "kv_heads", "head_dim", "intermediate_size", "seed", "head", "loss", "products")
    sizes = {n: getattr(params.train, n) for n in names}
    _, teacher = start_draft(target, target_ids(read_vocabulary(merged)[0]), **sizes)
    rows, checkpoint = read_rows(RowStore(HIDDEN_STATES), target.device), read_draft(DRAFT)
    draft = checkpoint.module(target.embedding.float())
    whole = evaluate(draft, teacher, rows, params)
    told("as it stands", whole)
    rounded = evaluate(as_exported(draft, "bfloat16"), teacher, rows, params)
    told("bfloat16", rounded)
    more, low, high = gain(whole.by_row, rounded.by_row)
    print(
        f"bfloat16 over {checkpoint.tensors['fc.weight'].dtype}, the same answers: {more:+.4f} ({low:+.4f} to {high:+.4f})"
    )
    if high < 0:
        sys.exit("rounding to bfloat16 costs accept length beyond chance")


if __name__ == "__main__":
    main()
