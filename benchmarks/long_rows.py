"""One optimizer step on one long row: peak memory above inputs and model, beside a bound known before.

    python -m benchmarks.long_rows [TOKENS [SUPERVISED]]

Synthetic states in the default target's sizes, a row of 32,768 tokens whose last 4,096 are supervised, 3 and 7 draft steps, with
and without `train.recompute_steps`, bfloat16 products with float32 weights as by default; each case in a process of its own, one
after the other. Peak: the highest resident memory while the step runs (VmHWM, reset before), less what was resident before it:
the row's states, the model and the optimizer's state.

The bound, in numbers of 4 bytes, is linear in queries and keys, for attention makes its scores a block at a time:

    3 B + 3 P V                                       a block of attention, a piece P of the head's positions
    + W (3 + steps / 2)                               weights' gradients and bfloat16 copies; 1 step with recompute_steps
    + T (6H + 2q + 4k) + K (10H + 8k)                 the tokens' and the keys' parts, made once, and their gradients
    + N (4H + 4k)                                     what every query of every step leaves: h, key, value, gradient, twice
    + n (4H + 4I + 3q + 2D + heads + 2k steps)        what one step keeps for the way back; without recompute_steps N, not n
    + n (4H + 4I + 3q + 2k steps)                     and its gradients while it is gone back through

B BLOCK_SCORES, or LEAST_QUERIES queries over all keys where that is more; T tokens, K keys, n queries of the first step, N of all;
H hidden size, I of the MLP, D of a head, q and k widths of all query and key heads; V draft vocabulary, W trained weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from stages.drafts._attention import BLOCK_SCORES, LEAST_QUERIES
from stages.drafts._loss import _PIECE
from stages.drafts._training import lay_out
from stages.drafts.eagle3 import Eagle3, Eagle3Config, PackedBatch, Schedule, Teacher, Trainer

TOKENS, SUPERVISED, THREADS = 32768, 4096, 2
SIZES = Eagle3Config(576, 1536, 9, 3, 64, 49152, 8192, 1e-5, 100000.0, 65536)  # SmolLM2-135M's draft
MB = 1 << 20


def long_row(c: Eagle3Config, tokens: int, supervised: int) -> PackedBatch:
    """A row of noise, its last tokens supervised."""
    g = torch.Generator().manual_seed(0)
    return PackedBatch(
        row_ids=("long",),
        lengths=(tokens,),
        input_ids=torch.randint(0, c.draft_vocab_size, (tokens,), generator=g),
        loss_mask=torch.arange(tokens) >= tokens - supervised,
        aux=torch.randn(tokens, 3 * c.hidden_size, generator=g),
        last=torch.randn(tokens, c.hidden_size, generator=g),
    )


def make_trainer(c: Eagle3Config, steps: int, recompute: bool) -> Trainer:
    """A draft of noise with a frozen head, as the line has it by default."""
    torch.manual_seed(0)
    draft = Eagle3(c, torch.randn(c.vocab_size, c.hidden_size))
    draft.lm_head.requires_grad_(False)
    draft.recompute_steps = recompute
    ids, head = torch.arange(c.draft_vocab_size), draft.lm_head.weight.detach()
    teacher = Teacher(torch.ones(c.hidden_size), head, c.eps, ids, c.vocab_size, products=torch.bfloat16)
    return Trainer(draft, teacher, Schedule(10, 1e-4, 0.0, 0.01, 1.0, steps, 0.8))


def bound_bytes(c: Eagle3Config, row: PackedBatch, steps: int, recompute: bool) -> int:
    """The formula above, for one row."""
    layout = lay_out(row.loss_mask, row.lengths, steps)
    T, K, n, N = len(row.input_ids), len(layout.keys_K), len(layout.roots[0]), sum(map(len, layout.roots))
    H, I, q, k = c.hidden_size, c.intermediate_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    weights = 3 * H * H + 2 * H * (q + 2 * k) + q * H + 3 * I * H
    numbers = 3 * max(BLOCK_SCORES["cpu"], LEAST_QUERIES * K * c.heads) + 3 * _PIECE * c.draft_vocab_size
    numbers += weights * (3 + (1 if recompute else steps) / 2)
    numbers += T * (6 * H + 2 * q + 4 * k) + K * (10 * H + 8 * k) + N * (4 * H + 4 * k)
    kept = 4 * H + 4 * I + 3 * q + 2 * c.head_dim + c.heads + 2 * k * steps
    numbers += (n if recompute else N) * kept + n * (4 * H + 4 * I + 3 * q + 2 * k * steps)
    return int(4 * numbers)


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def measure(steps: int, recompute: bool, tokens: int, supervised: int) -> dict[str, float]:
    """One optimizer step; the first, on a short row, makes what every step uses again."""
    torch.set_num_threads(THREADS)
    trainer, row = make_trainer(SIZES, steps, recompute), long_row(SIZES, tokens, supervised)
    trainer.train(long_row(SIZES, 256, 128))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    before, started, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    loss = float(trainer.train(row).loss.detach())
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    peak = resident("VmHWM") - before
    return {
        "loss": loss,
        "peak": peak,
        "bound": bound_bytes(SIZES, row, steps, recompute),
        "before": before,
        "s": took,
        "cpu_s": cpu,
    }


def in_its_own_process(*case: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.long_rows", "case", *map(str, case)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=dict(os.environ)).stdout)


def main() -> None:
    if sys.argv[1:2] == ["case"]:
        steps, recompute, tokens, supervised = map(int, sys.argv[2:])
        print(json.dumps(measure(steps, bool(recompute), tokens, supervised)))
        return
    tokens, supervised = (*map(int, sys.argv[1:]), *(TOKENS, SUPERVISED)[len(sys.argv) - 1 :])
    print(f"one row of {tokens} tokens, {supervised} of them supervised; hidden size {SIZES.hidden_size}")
    found: dict[tuple[int, int], dict[str, float]] = {}
    for recompute in (0, 1):
        for steps in (3, 7):
            case = found[steps, recompute] = in_its_own_process(steps, recompute, tokens, supervised)
            print(
                f"{steps} steps, {'recomputed' if recompute else 'all kept':10}: peak {case['peak'] / MB:.0f} MB, bound "
                f"{case['bound'] / MB:.0f} MB ({case['peak'] / case['bound']:.0%}); inputs and model {case['before'] / MB:.0f} MB; "
                f"{case['s']:.0f} s, {case['cpu_s']:.0f} CPU-s; loss {case['loss']:.6f}",
                flush=True,
            )
    plain, again = (found[7, r]["peak"] / found[3, r]["peak"] for r in (0, 1))
    print(f"peak of 7 steps over 3: {plain:.2f} all kept, {again:.2f} recomputed")
    slower = [found[steps, 1]["cpu_s"] / found[steps, 0]["cpu_s"] for steps in (3, 7)]
    print(f"CPU time recomputed over all kept: {slower[0]:.2f} with 3 steps, {slower[1]:.2f} with 7")
    if any(case["peak"] > case["bound"] for case in found.values()):
        sys.exit("a step needed more memory than its bound")


if __name__ == "__main__":
    main()
