"""Kimi-K2.5: Kimi-K2 as the text model of a larger one (`text_config`, names below `language_model.`); images are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.targets._decoder import Decoder
from stages.targets._latent import read_latent_decoder


def load(folder: Path, config: dict[str, Any], device: str, dtype: str, *, stored: bool = False) -> Decoder:
    return read_latent_decoder(folder, config, device, dtype, stored=stored)
