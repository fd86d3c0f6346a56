"""AngelSlim: rows_{s}-{s+5000}/data_{i}.ckpt.

A sample (torch.save): input_ids [1, L], loss_mask [1, L], hidden_states [1, L, 3H] (the auxiliary states), target_hiddens
[1, L, H] (the last, after the final norm with its transformers backend).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.bridges.kinds import ForeignRow, Look, StoreFile, StoreKind

SAMPLE = re.compile(r"data_(?P<index>\d+)\.ckpt")
SIDE_FILES: frozenset[str] = frozenset()
CONFIG = ""


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE) or "target_hiddens" not in look.names.keys:
        return None
    # numbered as SpecForge does: the output of a 0-based layer, hidden_states[id + 1] of transformers
    return StoreKind("angelslim", "any", None, "after_final_norm", "rows_{s}-{s+5000}/data_{i}.ckpt", "specforge")


def read(sample: dict[str, Any], file: StoreFile, path: Path) -> Iterator[ForeignRow]:
    """The one row of data_{i}.ckpt.

    Raises:
        DataError: a part is missing, or parts do not fit each other.
    """
    from stages.bridges._rows import read_joined

    yield read_joined(sample, file, path, last="target_hiddens", aux="hidden_states")


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    """Nothing beside the samples says which layers they are of."""
    return None
