"""Inert; see torchvision/__init__.py."""

from draftline_sglang_cpu.absent import answer_for

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]

__getattr__ = answer_for(__name__)
