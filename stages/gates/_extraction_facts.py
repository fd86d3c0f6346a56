"""Prepared rows as counts and comparisons that plain expectations can judge."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.gates._extraction_evidence import Evidence

if TYPE_CHECKING:
    from pandas import DataFrame

_TAKEN = (
    "row_id",
    "prompt_id",
    "source",
    "domain",
    "split",
    "finish",
    "messages",
    "repetitive",
    "on_policy",
    "prompt_tokens",
)
_COUNTED = ("tokens", "mask_tokens", "lowest_id", "highest_id", "strange_mask_values", "supervised_tokens")
_COMPARED = ("longest_supervised_run", "first_supervised_token", "recomputed_row_id", "recomputed_prompt_id")
_FACTS = [*_TAKEN, *_COUNTED, *_COMPARED, "begins_as_the_template", "opening_bos"]


def row_facts(evidence: Evidence) -> DataFrame:
    """One line a row: counts and comparisons that plain expectations can judge."""
    import pandas as pd

    splits: Any = evidence.rows.groupby("prompt_id")["split"].nunique()  # pandas is typed too widely to be of use
    facts = [_facts(row, evidence) for row in evidence.rows.to_dict("records")]
    frame = pd.DataFrame(facts, columns=_FACTS)
    frame["splits_of_prompt"] = frame["prompt_id"].map(splits)
    return frame


def _facts(row: dict[str, Any], evidence: Evidence) -> dict[str, Any]:
    ids, mask = np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], np.uint8)
    prefix = evidence.template_prefix
    supervised = np.flatnonzero(mask)
    first = int(supervised[0]) if len(supervised) else -1
    return {
        **{k: row[k] for k in _TAKEN},
        "tokens": len(ids),
        "mask_tokens": len(mask),
        "lowest_id": int(ids.min(initial=0)),
        "highest_id": int(ids.max(initial=0)),
        "strange_mask_values": int((mask > 1).sum()),
        "supervised_tokens": int((mask == 1).sum()),
        "longest_supervised_run": _longest_run(mask),
        "first_supervised_token": first,
        "recomputed_row_id": hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()[:24],
        "recomputed_prompt_id": hashlib.sha256(ids[: row["prompt_tokens"]].tobytes()).hexdigest()[:24],
        "begins_as_the_template": tuple(ids[: len(prefix)].tolist()) == prefix,
        "opening_bos": opening_bos(ids, evidence.bos_id),
    }


def _longest_run(mask: np.ndarray) -> int:
    edges = np.diff(np.concatenate([[0], (mask == 1).astype(np.int8), [0]]))
    return int((np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)).max(initial=0))


def opening_bos(ids: np.ndarray, bos: int | None) -> int:
    """How many beginning-of-sequence tokens the row opens with."""
    others = np.flatnonzero(ids != (-1 if bos is None else bos))
    return int(others[0]) if len(others) else len(ids)
