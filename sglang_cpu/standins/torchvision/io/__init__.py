"""Inert; see torchvision/__init__.py."""

from draftline_sglang_cpu.absent import answer_for

__getattr__ = answer_for(__name__)
