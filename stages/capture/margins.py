"""How far a stored state may lie from the target run again, by the dtype it was stored in and the one it was computed in.

Relative L2 a position, the first left out. Measured on SmolLM2-135M: bfloat16 storage 1.6e-3 on average and 3.7e-3 at most;
bfloat16 compute against float32 .006 to .015 on average, 99 % of positions below .042; float32 batched, padded or incremental
8e-6 at most; the next layer is .25 to .40 away. float16 has three bits more than bfloat16, hence an eighth of its figures.
"""

from __future__ import annotations

from dataclasses import dataclass

REFUSED = 0.10  # median; nothing that is merely imprecise comes this far


@dataclass(frozen=True)
class Margin:
    """The median over a row's positions and the 99th percentile that precision explains."""

    median: float
    p99: float


_COMPUTED = {"float32": Margin(1e-5, 1e-4), "float16": Margin(4e-3, 1e-2), "bfloat16": Margin(0.03, 0.08)}
_STORED = {"float32": Margin(1e-5, 1e-4), "float16": Margin(4e-4, 1e-3), "bfloat16": Margin(3e-3, 8e-3)}
# Storing with eight bits keeps one to four of them, whatever was computed.
_COARSE = Margin(0.08, 0.2)


def margin_of(stored: str, computed: str | None = None) -> Margin:
    """What states stored as `stored` may differ by when the coarser side computed in `computed`.

    Args:
        computed: float32, float16 or bfloat16: of capture and of the run that they are compared with, the coarser one.
            None: not known, and then taken to be the dtype they are stored in, as engines store what they compute.
    """
    kept = _STORED.get(stored, _COARSE)
    made = _COMPUTED.get(computed or stored, _COMPUTED["bfloat16"])
    return Margin(max(kept.median, made.median), max(kept.p99, made.p99))


def coarser(one: str, other: str) -> str:
    """Of two compute dtypes the one with fewer bits."""
    return max(one, other, key=lambda name: _COMPUTED.get(name, _COMPUTED["bfloat16"]).median)
