"""Kimi-K2: DeepSeek-V3 with other figures, under its own name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.targets._decoder import Decoder
from stages.targets._latent import read_latent_decoder


def load(folder: Path, config: dict[str, Any], device: str, dtype: str, *, stored: bool = False) -> Decoder:
    return read_latent_decoder(folder, config, device, dtype, stored=stored)
