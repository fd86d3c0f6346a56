"""Training speed: supervised tokens per CPU second and wall second, beside the floor that this machine's own matrix
products set. Needs a merged set (`dvc repro gate-training`); changes nothing.

    python -m benchmarks.training

The floor counts the products of one step and divides by the rate that a product of the head's shape reaches here, in
the same run; everything else (attention, norms, the softmax over the draft vocabulary, the optimizer) is above it. Fails
when less than half of the time is explained by products at that rate.
"""

from __future__ import annotations

import sys
import time

import torch

from stages.capture.store import RowStore
from stages.contracts.manifest import HIDDEN_STATES, MERGED_MANIFEST, MergedManifest
from stages.contracts.params import load_params
from stages.drafts._training import lay_out
from stages.drafts.eagle3 import BatchOrder, Eagle3Config, PackedBatch, Trainer, start_draft
from stages.targets import load_target, locate_target
from stages.train import read_rows, read_vocabulary, schedule_of

_WARM, _TIMED = 2, 8  # optimizer steps
_MIN_SHARE = 0.5  # of the floor's speed


def products_flop(config: Eagle3Config, batch: PackedBatch, steps: int) -> float:
    """Floating point operations of the matrix products of one optimizer step on `batch`.

    Forward once, backward twice (weights, inputs); fc has no gradient to its inputs; the target's head runs forward.
    """
    c, layout = config, lay_out(batch.loss_mask, batch.lengths, steps)
    H, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    keys, roots = len(layout.keys_K), [len(r) for r in layout.roots]
    head = H * c.draft_vocab_size
    block = 2 * H * q + q * H + 3 * H * c.intermediate_size + head  # q, o, mlp, head at every query
    needed = len(torch.unique(torch.cat([r + 1 + i for i, r in enumerate(layout.roots)])))
    macs = 2 * keys * 3 * H * H + 3 * keys * 4 * H * kv + needed * head
    macs += 3 * (sum(roots) * block + sum(roots[1:]) * 4 * H * kv)
    return 2.0 * macs


def product_rate(config: Eagle3Config, rows: int) -> float:
    """Floating point operations a second of the head's product [rows, H] x [H, D] here and now: the best of five."""
    x, w = torch.randn(rows, config.hidden_size), torch.randn(config.draft_vocab_size, config.hidden_size)
    out, best = torch.empty(rows, config.draft_vocab_size), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(x, w.T, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * w.numel() / best


def main() -> None:
    params, merged = load_params(), MergedManifest.read(MERGED_MANIFEST)
    torch.set_num_threads(params.target.threads)
    target = load_target(locate_target(params.target.origin), params.target.device)
    d2t, _ = read_vocabulary(merged)
    told = params.train
    names = ("heads", "kv_heads", "head_dim", "intermediate_size", "seed", "head", "loss", "products")
    sizes = {name: getattr(told, name) for name in names}
    draft, teacher = start_draft(target, d2t + torch.arange(len(d2t)), **sizes)
    rows = read_rows(RowStore(HIDDEN_STATES), target.device)
    trainer, config = Trainer(draft, teacher, schedule_of(params)), draft.config
    order = BatchOrder([row.length for row in rows.train], told.batch_tokens, told.seed)
    tokens, flop, rates = 0, 0.0, [product_rate(config, 1024)]
    for step in range(_WARM + _TIMED):
        if step == _WARM:
            wall, cpu = time.perf_counter(), time.process_time()
        batch = rows.pack([rows.train[i] for i in order(step)])
        ahead = trainer.train(batch)
        if step >= _WARM:
            tokens += len(ahead.roots)
            flop += products_flop(config, batch, told.steps_ahead)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    rates.append(product_rate(config, 1024))
    rate = max(rates)
    print(f"supervised tokens            {tokens} in {_TIMED} optimizer steps, {told.steps_ahead} draft steps ahead")
    print(f"tokens/CPU-s                 {tokens / cpu:.0f}")
    print(f"tokens/s                     {tokens / wall:.0f} on {params.target.threads} threads")
    print(f"products, MFLOP a token      {flop / tokens / 1e6:.0f}")
    print(f"product rate here, GFLOP/s   {rate / 1e9:.0f}")
    print(f"floor, tokens/s              {tokens * rate / flop:.0f}")
    print(f"of the floor                 {flop / rate / wall:.2f} (at least {_MIN_SHARE})")
    if flop / rate / wall < _MIN_SHARE:
        sys.exit("training is slower than its products explain")


if __name__ == "__main__":
    main()
