"""The floor of a training step: the products it cannot do without, at the rate that this machine multiplies."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch

from stages.drafts._training import lay_out
from stages.drafts.eagle3 import Eagle3Config, PackedBatch

_KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "softmax, exp, log": ("aten::_softmax", "aten::exp", "aten::exp_", "aten::log", "aten::logsumexp", "aten::amax"),
    "copies and gathers": ("aten::copy_", "aten::cat", "aten::index", "aten::index_select", "aten::fill_", "aten::index_add_"),
    "optimizer": ("aten::_fused_adamw_", "aten::lerp_", "aten::_foreach_norm", "aten::_foreach_mul_"),
}  # fmt: skip


def products_flop(config: Eagle3Config, batch: PackedBatch, steps: int, head_trained: bool) -> float:
    """Floating point operations of the matrix products of one optimizer step on `batch`.

    Forward once, backward twice (weights, inputs); fc has no gradient to its inputs, a frozen head none to its weights, and
    the target's head runs forward only. Attention, a few per cent at these lengths, is not counted.
    """
    c, layout = config, lay_out(batch.loss_mask, batch.lengths, steps)
    H, q, kv = c.hidden_size, c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim
    keys, roots = len(layout.keys_K), [len(r) for r in layout.roots]
    fed = [r + 1 + i for i, r in enumerate(layout.roots)]
    queried, known = (len(torch.unique(torch.cat(t))) for t in (fed, [layout.keys_K + 1, *fed]))
    head = H * c.draft_vocab_size
    macs = 2 * keys * 3 * H * H + 3 * (keys * H * kv + known * H * kv + queried * H * q) + queried * head
    macs += 3 * sum(roots) * (H * q + q * H + 3 * H * c.intermediate_size) + 3 * sum(roots[1:]) * H * kv
    macs += (3 if head_trained else 2) * sum(roots) * head
    return 2.0 * macs


def product_rate(config: Eagle3Config, dtype: torch.dtype) -> float:
    """Floating point operations a CPU second of the MLP's product over 1024 rows: the best of five."""
    x = torch.randn(1024, config.hidden_size).to(dtype)
    w = torch.randn(config.intermediate_size, config.hidden_size).to(dtype)
    out, best = x.new_empty(len(x), len(w)), float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(10):
            torch.mm(x, w.T, out=out)
        best = min(best, time.process_time() - start)
    return 10 * 2 * len(x) * w.numel() / best


def where_time_goes(step: Callable[[], None]) -> dict[str, float]:
    """Shares of a step's time by kind of operation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    found: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        kind = next((kind for kind, names in _KINDS.items() if event.key in names), "the rest")
        found[kind] += event.self_cpu_time_total
    total = sum(found.values())
    return {kind: round(found[kind] / total, 3) for kind in (*_KINDS, "the rest")}
