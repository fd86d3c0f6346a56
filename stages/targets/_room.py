"""How large a target is, how much memory is free, and so how the target is held."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import torch

from stages.contracts.errors import EngineError

Load = Literal["auto", "whole", "layer_by_layer"]
_SPARE = 1.5  # weights beside their packed copies, states and the rest
_SCALES = ("weight_scale", "weight_scale_inv", "weight_shape")
_VALUES_A_WORD = 8  # of int4 in weight_packed


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a target's weights once they are in memory in `dtype`, from the headers of its files."""
    values = 0
    for file in sorted(folder.glob("*.safetensors")):
        for name, told in _header(file).items():
            if name != "__metadata__" and not name.endswith(_SCALES):
                values += math.prod(told["shape"]) * (_VALUES_A_WORD if name.endswith("weight_packed") else 1)
    return values * getattr(torch, dtype).itemsize


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    """Names, dtypes and shapes of a safetensors file: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        data = file.read(length) if length <= path.stat().st_size else b""
    try:
        return json.loads(data)
    except ValueError as error:
        raise EngineError(
            "A weight file of the target has no header", where=str(path), got=f"{path.stat().st_size} bytes"
        ) from error


def free_bytes(device: str, proc: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be had on a device; on a CPU what the machine has available, within the container's limit."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0]
    told = dict(line.split(":") for line in proc.read_text().splitlines() if ":" in line)
    free = int(told["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # no control group, or one of the older kind
        return free
    return free if limit == "max" else min(free, int(limit) - used + int(cached.get("inactive_file", 0)))


def choose(load: Load, need: int, free: int, device: str) -> tuple[bool, str]:
    """Whether the weights stay in their files, and that in words.

    Args:
        need: bytes of the weights in memory.
        free: bytes of memory that can be had.
    """
    sizes = f"{need / 1e9:.2f} GB of weights, {free / 1e9:.1f} GB free on {device}"
    stored = load == "layer_by_layer" or (load == "auto" and need * _SPARE > free)
    why = "by size" if load == "auto" else "as params.yaml says"
    return stored, f"the target is {'read layer by layer' if stored else 'held whole'}, {why}: {sizes}"


def tokens_together(layers: int, hidden_size: int, dtype: torch.dtype, free: int) -> int:
    """Tokens whose states at every point fill a quarter of the free memory."""
    return max(free // 4 // ((layers + 3) * hidden_size * dtype.itemsize), 1)
