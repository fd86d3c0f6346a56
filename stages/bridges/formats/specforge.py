"""SpecForge: rows_{g}-{g+2000}/data_{i}.ckpt, or .ckpt.gz.

A sample (torch.save): input_ids i64 [L], loss_mask i64 [L], hidden_state bf16 [1, L, H] after the final norm,
aux_hidden_state bf16 [1, L, 3H]. No config; rows are padded to the longest of their batch.
"""

from __future__ import annotations

import re

from stages.bridges.kinds import Look, StoreKind

SAMPLE = re.compile(r"data_(?P<index>\d+)\.ckpt(\.gz)?")
SIDE_FILES = frozenset({"vocab_mapping.pt"})


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE):
        return None
    if look.names.keys and "aux_hidden_state" not in look.names.keys:
        return None
    return StoreKind(
        tool="specforge",
        era="any",
        dialect=None,
        last_state="after_final_norm",
        pattern="rows_{g}-{g+2000}/data_{i}.ckpt" + (".gz" if look.suffix == ".gz" else ""),
        numbering="specforge",
    )
