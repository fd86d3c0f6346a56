"""AngelSlim: rows_{s}-{s+5000}/data_{i}.ckpt.

A sample (torch.save): input_ids [1, L], loss_mask [1, L], hidden_states [1, L, 3H] (the auxiliary states), target_hiddens
[1, L, H] (the last, after the final norm with its transformers backend).
"""

from __future__ import annotations

import re

from stages.bridges.kinds import Look, StoreKind

SAMPLE = re.compile(r"data_(?P<index>\d+)\.ckpt")
SIDE_FILES: frozenset[str] = frozenset()


def recognise(look: Look) -> StoreKind | None:
    if not look.fits(SAMPLE) or "target_hiddens" not in look.names.keys:
        return None
    return StoreKind("angelslim", "any", None, "after_final_norm", "rows_{s}-{s+5000}/data_{i}.ckpt")
