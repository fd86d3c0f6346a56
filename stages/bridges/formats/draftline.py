"""This project's own row folders: rows_{start}-{end}/rows.safetensors with data_config.json beside it, `end` exclusive."""

from __future__ import annotations

import re

from stages.bridges.kinds import Look, StoreKind

SAMPLE = re.compile(r"(?P<index>rows)\.safetensors")
SIDE_FILES = frozenset({"data_config.json"})


def recognise(look: Look) -> StoreKind | None:
    ours = look.config is not None and (
        ("capture" in look.config and "folders" in look.config) or "row_ids" in look.config
    )
    if not ours and not look.fits(SAMPLE):
        return None
    return StoreKind("draftline", "any", None, "before_final_norm", "rows_{start}-{end}/rows.safetensors")
