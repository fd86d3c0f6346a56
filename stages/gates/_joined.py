"""Prepared rows, stored states, index and vocabulary set side by side: the plain tables that gate-training judges."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.files import file_digest
from stages.contracts.manifest import (
    MERGED,
    CapturedFolder,
    CaptureManifest,
    MergedManifest,
    PreparedManifest,
    TargetIdentity,
)
from stages.contracts.params import Params

if TYPE_CHECKING:
    from pandas import DataFrame

Stored = dict[str, list[dict[str, Any]]]  # by row id, a record each time it is stored


def blank_folder(f: CapturedFolder) -> dict[str, Any]:
    """A folder of which nothing but its record is known yet."""
    known = {"folder": f.name, "source": f.source, "start": f.start, "end": f.end, "tokens": f.tokens}
    recorded = {"recorded_digest": f.rows_digest, "recorded_config": f.config_digest}
    unknown = {"found_config": "unread", "capture": "unread", "rows_stored": -1, "tokens_stored": -1}
    return {**known, **recorded, **unknown, "slots": -1, "width": -1, "dtype": "unread", "fault": "none"}


def join_rows(rows: DataFrame, stored: Stored, entries: DataFrame) -> DataFrame:
    """One line a row that is prepared, captured or indexed."""
    import pandas as pd

    index: dict[str, list[dict[str, Any]]] = {}
    for entry in entries.to_dict("records"):
        index.setdefault(entry["row_id"], []).append(entry)
    times, lengths = Counter(rows["row_id"]), dict(zip(rows["row_id"], rows["input_ids"].map(len), strict=True))
    split = dict(zip(rows["row_id"], rows["split"], strict=True))
    lines: list[dict[str, Any]] = []
    for row_id in dict.fromkeys([*times, *stored, *index]):
        s, i = (stored.get(row_id) or [{}])[0], (index.get(row_id) or [{}])[0]
        place = ("folder", "row_in_folder", "offset")
        lines.append(
            {
                "row_id": row_id,
                "folder": s.get("folder", "no folder"),
                "times_prepared": times.get(row_id, 0),
                "times_captured": len(stored.get(row_id, ())),
                "times_indexed": len(index.get(row_id, ())),
                "tokens": lengths.get(row_id, -1),
                "stored_tokens": s.get("tokens", -1),
                "ids_equal": bool(s.get("ids_equal", False)),
                "mask_equal": bool(s.get("mask_equal", False)),
                "not_finite": s.get("nan", 0) + s.get("inf", 0),
                "zero_states": s.get("zero_states", 0),
                "constant_slots": s.get("constant_slots", 0),
                "equal_slots": s.get("equal_slots", 0),
                "copy_of": s.get("copy_of", "none"),
                "index_finds_it": bool(s) and all(s.get(k) == i.get(k) for k in place),
                "split_equal": split.get(row_id) == i.get("split"),
            }
        )
    return pd.DataFrame(lines)


def always_there(folder: Path) -> dict[str, int]:
    """EOS and the tokenizer's special tokens, by name."""
    config, tokenizer = (json.loads((folder / n).read_text()) for n in ("config.json", "tokenizer.json"))
    config |= config.get("text_config") or {}
    eos = config.get("eos_token_id")
    named = {
        str(t["content"]): int(t["id"]) for t in tokenizer.get("added_tokens", []) if t["id"] < config["vocab_size"]
    }
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return {**named, **{f"end of sequence {i}": int(i) for i in ends if i not in named.values()}}


def coverage(rows: DataFrame, marked: frozenset[int], merged: MergedManifest, params: Params) -> DataFrame:
    """Share of supervised tokens that the draft can say, counted again."""
    import numpy as np
    import pandas as pd

    known = np.zeros(max(merged.target.vocab_size, max(marked, default=0) + 1), bool)
    known[list(marked)] = True
    said = [np.asarray(i)[np.asarray(m) == 1] for i, m in zip(rows["input_ids"], rows["loss_mask"], strict=True)]
    counted = rows[["split", "domain"]].assign(hits=[int(known[s].sum()) for s in said], total=[len(s) for s in said])
    gate, was = params.gates.training, merged.coverage
    held = counted[counted["split"] == "held_out"]
    sets = [
        ("train", counted[counted["split"] == "train"], was.train, gate.min_train_coverage),
        ("held out", held, was.held_out, gate.min_held_out_coverage),
        *((f"held out, {d}", held[held["domain"] == d], c, 0.0) for d, c in sorted(was.by_domain_held_out.items())),
    ]
    lines: list[dict[str, Any]] = []
    for name, part, recorded, least in sets:
        share = float(part["hits"].sum() / max(part["total"].sum(), 1))
        words = f"{share:.1%} of {part['total'].sum()} tokens, least {least:.1%}"
        lines.append(
            {"set": name, "recorded": round(recorded, 9), "found": round(share, 9), "least": least, "words": words}
        )
    return pd.DataFrame(lines)


def chain(
    prepared: PreparedManifest, capture: CaptureManifest, merged: MergedManifest, target: TargetIdentity, params: Params
) -> DataFrame:
    """What has to be equal along prepared rows, states and merged set."""
    import pandas as pd

    pairs: list[tuple[str, Any, Any]] = [
        ("prepared rows of the merged set", prepared.digest(), merged.prepared_digest),
        ("prepared rows of the states", prepared.digest(), capture.prepared_digest),
        ("states of the merged set", capture.digest(), merged.capture_digest),
        ("index.parquet", merged.index_digest, file_digest(MERGED / "index.parquet")),
        ("vocabulary.safetensors", merged.vocabulary_digest, file_digest(MERGED / "vocabulary.safetensors")),
        ("weights that the states were captured from", target.weights_digest, merged.capture.weights_digest),
        ("weights that answered", target.weights_digest, merged.target.weights_digest),
        ("tokenizer", target.tokenizer_digest, merged.target.tokenizer_digest),
        ("chat template", target.template_digest, merged.target.template_digest),
        ("points", list(params.capture.points), list(merged.capture.points)),
        ("layers", params.target.layers, merged.capture.layers),
        ("hidden size", params.target.hidden_size, merged.capture.hidden_size),
        ("compute dtype", params.target.dtype, merged.capture.compute_dtype),
    ]
    return pd.DataFrame([{"item": i, "expected": str(e), "found": str(f)} for i, e, f in pairs])
