"""Qwen3 (dense): Llama's names, with a norm on each head's queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.targets._checkpoint import read_decoder
from stages.targets._decoder import Decoder


def load(folder: Path, config: dict[str, Any], device: str, dtype: str, *, stored: bool = False) -> Decoder:
    return read_decoder(folder, config, device, dtype, qk_norm=True, stored=stored)
