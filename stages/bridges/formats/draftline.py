"""This project's own row folders: rows_{start}-{end}/rows.safetensors with data_config.json beside it, `end` exclusive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.bridges.kinds import ForeignRow, Look, StoreFile, StoreKind

SAMPLE = re.compile(r"(?P<index>rows)\.safetensors")
SIDE_FILES = frozenset({"data_config.json"})
CONFIG = ""


def recognise(look: Look) -> StoreKind | None:
    ours = look.config is not None and (
        ("capture" in look.config and "folders" in look.config) or "row_ids" in look.config
    )
    if not ours and not look.fits(SAMPLE):
        return None
    return StoreKind("draftline", "any", None, "before_final_norm", "rows_{start}-{end}/rows.safetensors")


def read(sample: dict[str, Any], file: StoreFile, path: Path) -> Iterator[ForeignRow]:
    """Raises DataError: these folders need no bridge."""
    from stages.bridges._open import damaged

    raise damaged(
        path,
        "This is a store of this project's own",
        expected="another tool's",
        got=file.name,
        do="put it at data/hidden_states, beside the data/prepared that it was made from, or use its work cache",
    )
    yield  # a generator, as in every format


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    """Nothing beside the samples says which layers they are of."""
    return None
