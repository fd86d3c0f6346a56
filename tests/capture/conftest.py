"""One tiny target for the whole room, and rows of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stages.capture.rows import FolderPlan, Row, row_id
from stages.contracts.manifest import CaptureSpec
from stages.targets import load_target
from stages.targets._decoder import Decoder
from tests import tiny

SPEC = CaptureSpec(
    weights_digest="sha256:tiny",
    code_digest="sha256:code",
    points=tiny.POINTS,
    layers=tiny.LAYERS,
    hidden_size=tiny.HIDDEN,
    compute_dtype="float32",
)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.set_num_threads(1)
    return load_target(tiny.make_target(tmp_path_factory.mktemp("target")))


def make_row(seed: int, tokens: int = 0) -> Row:
    """A row of random tokens, the second half supervised; as long as asked for, or of 5 to 40 tokens."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 259, tokens or int(rng.integers(5, 40))).astype(np.int32)
    mask = (np.arange(len(ids)) >= len(ids) // 2).astype(np.uint8)
    return Row(row_id(ids, mask), ids, mask)


def make_plan(seeds: range, start: int = 0, source: str = "code") -> FolderPlan:
    return FolderPlan(source, start, tuple(make_row(seed) for seed in seeds))


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` and its bytes."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
