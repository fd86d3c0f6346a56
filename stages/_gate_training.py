"""What gate-training judges, gathered."""

from __future__ import annotations

import sys

from stages._gate_files import Gathered, demand_bytes, prepared_rows
from stages._gate_states import choose_rows, look_at_folders, probe
from stages.contracts.manifest import (
    HIDDEN_STATES,
    MERGED,
    MERGED_MANIFEST,
    PREPARED,
    PREPARED_MANIFEST,
    CaptureManifest,
    MergedManifest,
    PreparedManifest,
)
from stages.contracts.params import Params
from stages.gates import training
from stages.gates._joined import always_there, chain, coverage, join_rows
from stages.targets import identify_target, locate_target, open_target


def gather_training(params: Params) -> Gathered:
    """Stored states against prepared rows and against the target run again; the draft vocabulary."""
    import numpy as np
    import pandas as pd
    import torch
    from safetensors.numpy import load_file

    from stages.capture.store import RowStore

    torch.set_num_threads(params.target.threads)
    prepared, merged = PreparedManifest.read(PREPARED_MANIFEST), MergedManifest.read(MERGED_MANIFEST)
    capture, store = CaptureManifest.read(HIDDEN_STATES / "data_config.json"), RowStore(HIDDEN_STATES)
    folder = locate_target(params.target.origin)
    for source in prepared.sources:
        demand_bytes(PREPARED / source.name / "rows.parquet", source.rows_digest)
    demand_bytes(MERGED / "index.parquet", merged.index_digest)
    demand_bytes(MERGED / "vocabulary.safetensors", merged.vocabulary_digest)
    rows = prepared_rows(prepared)
    folders, stored = look_at_folders(merged.folders, store, rows)
    vocabulary = load_file(MERGED / "vocabulary.safetensors")
    target_ids = np.arange(len(vocabulary["d2t"])) + vocabulary["d2t"]
    marked = frozenset(np.flatnonzero(vocabulary["t2d"]).tolist())
    target, held = open_target(folder, params.target.device, params.target.dtype, params.gates.training.target_load)
    print(f"gate-training: {held}", file=sys.stderr, flush=True)
    greedy = prepared.temperature == 0
    chosen = choose_rows(store, merged.folders, stored, params)
    slots, last = probe(target, store, chosen, merged.capture, params, greedy)
    evidence = training.Evidence(
        manifest=merged,
        folders=folders,
        rows=join_rows(rows, stored, pd.read_parquet(MERGED / "index.parquet")),
        slots=slots,
        unprobed=len(merged.folders) - len(chosen),
        last=last,
        target_ids=tuple(target_ids.tolist()),
        in_t2d=marked,
        always=always_there(folder),
        coverage=coverage(rows, marked, merged, params),
        chain=chain(prepared, capture, merged, identify_target(folder, params.target.name), params),
    )
    return "merged rows and states", merged.digest(), training.tables(evidence, params)
