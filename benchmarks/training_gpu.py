"""An 8B target's draft trained on synthetic states for two minutes a case: tokens/s, model FLOP utilisation, peak memory.

    python -m benchmarks.training_gpu

Needs a CUDA GPU and nothing of the line. Hidden 4096, draft vocabulary 32,000, bfloat16 products with float32 weights; rows of
2,048 tokens whose second half is supervised. The FLOPs are those of the products that a step cannot do without. tests/drafts
runs `measure` on a CPU with small shapes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch

from benchmarks.training_floor import products_flop
from stages.drafts.eagle3 import Eagle3, Eagle3Config, PackedBatch, Schedule, Teacher, Trainer

SECONDS, ROWS, ROW_TOKENS, WARM = 120.0, 4, 2048, 3
SIZES = Eagle3Config(4096, 14336, 32, 8, 128, 128256, 32000, 1e-5, 500000.0, 131072)
DENSE_BFLOAT16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}  # FLOP/s of the data sheets


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    flop_per_s: float
    peak_gb: float
    loss: float


def synthetic(c: Eagle3Config, rows: int, row_tokens: int, device: torch.device) -> PackedBatch:
    """Rows of noise, the second half of each supervised."""
    T, H = rows * row_tokens, c.hidden_size
    generator = torch.Generator(device).manual_seed(0)
    supervised = torch.arange(row_tokens, device=device) >= row_tokens // 2
    return PackedBatch(
        row_ids=tuple(f"row {i}" for i in range(rows)),
        lengths=(row_tokens,) * rows,
        input_ids=torch.randint(0, c.draft_vocab_size, (T,), generator=generator, device=device),
        loss_mask=supervised.repeat(rows),
        aux=torch.randn(T, 3 * H, generator=generator, device=device),
        last=torch.randn(T, H, generator=generator, device=device),
    )


def measure(c: Eagle3Config, device: torch.device, steps: int, rows: int, row_tokens: int, seconds: float) -> Measured:
    """Train on one synthetic batch over and over."""
    torch.manual_seed(0)
    with device:
        draft = Eagle3(c, torch.randn(c.vocab_size, c.hidden_size))
        ids, head = torch.arange(c.draft_vocab_size), torch.randn(c.draft_vocab_size, c.hidden_size) * 0.02
        norm = torch.ones(c.hidden_size)
    teacher = Teacher(norm, head, c.eps, ids, c.vocab_size, products=torch.bfloat16)
    trainer = Trainer(draft, teacher, Schedule(1_000_000, 1e-4, 0.0, 0.01, 1.0, steps, 0.8))
    batch = synthetic(c, rows, row_tokens, device)
    flop = products_flop(c, batch, steps, head_trained=True)

    def waited() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(WARM):
        trainer.train(batch)
    done, started, loss = 0, waited(), 0.0
    while waited() - started < seconds:
        loss = float(trainer.train(batch).loss.detach())
        done += 1
    took = waited() - started
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return Measured(done * rows * row_tokens / took, done * flop / took, peak, loss)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here: this benchmark has nothing to measure (the same code runs small in tests/drafts)")
    name = torch.cuda.get_device_name()
    rate = next((r for key, r in DENSE_BFLOAT16.items() if key in name), None)
    for steps in (3, 7):
        torch.cuda.reset_peak_memory_stats()
        found = measure(SIZES, torch.device("cuda"), steps, ROWS, ROW_TOKENS, SECONDS)
        share = f"{found.flop_per_s / rate:.1%} of {rate / 1e12:.0f} TFLOP/s" if rate else "peak rate not known"
        print(
            f"{name}, {steps} steps: {found.tokens_per_s:.0f} tokens/s, {found.flop_per_s / 1e12:.0f} TFLOP/s ({share}), "
            f"peak {found.peak_gb:.1f} GB, loss {found.loss:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
