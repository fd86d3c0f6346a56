"""Llama, and what shares its names and config: SmolLM2, Llama 3.x, Mistral in Llama form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.targets._checkpoint import read_decoder
from stages.targets._decoder import Decoder


def load(folder: Path, config: dict[str, Any], device: str, dtype: str, *, stored: bool = False) -> Decoder:
    return read_decoder(folder, config, device, dtype, qk_norm=False, stored=stored)
