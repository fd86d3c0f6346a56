"""Inert; see torchvision/__init__.py."""

import enum

from draftline_sglang_cpu.absent import answer_for


class InterpolationMode(enum.Enum):
    """Named in tables that SGLang and transformers build when they are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = answer_for(__name__)
