"""What gate-deployment judges, gathered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages._gate_files import Gathered
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord, read_draft_config
from stages.contracts.errors import DataError
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    TRAIN_METRICS,
    BenchmarkEvidence,
    ServeEvidence,
    ServingPolicy,
    TrainMetrics,
)
from stages.contracts.files import file_digest
from stages.contracts.manifest import MERGED_MANIFEST, MergedManifest
from stages.contracts.params import Params
from stages.contracts.release import current_record
from stages.contracts.report import GateReport, report_path
from stages.gates import deployment
from stages.targets import identify_target, locate_target

if TYPE_CHECKING:
    from pandas import DataFrame


def gather_deployment(params: Params) -> Gathered:
    """The draft's files, what was measured with them, and the last release."""
    record = DraftRecord.read(DRAFT / DRAFT_RECORD)
    merged = MergedManifest.read(MERGED_MANIFEST)
    if merged.digest() != record.merged_digest:
        raise DataError(
            "The merged set here is not the one that the draft was trained on",
            where=str(MERGED_MANIFEST),
            expected=record.merged_digest,
            got=merged.digest(),
            do="run `dvc repro train`, or `dvc checkout` to bring data and draft into step",
        )
    config = read_draft_config(DRAFT / "config.json")
    tensors, d2t, marked = look_at_tensors(DRAFT / "model.safetensors")
    evidence = deployment.Evidence(
        record=record,
        config=config,
        config_points=config_points(config, record),
        tensors=tensors,
        d2t=d2t,
        in_t2d=marked,
        weights_digest=file_digest(DRAFT / "model.safetensors"),
        config_digest=file_digest(DRAFT / "config.json"),
        target=identify_target(locate_target(params.target.origin), params.target.name),
        train=TrainMetrics.read(TRAIN_METRICS),
        serve=ServeEvidence.read(SERVE_EVIDENCE),
        benchmark=BenchmarkEvidence.read(BENCHMARK_EVIDENCE),
        policy=ServingPolicy.read(POLICY),
        reports=(GateReport.read(report_path("extraction")), GateReport.read(report_path("training"))),
        prepared_digest=merged.prepared_digest,
        release=current_record(),
    )
    return "draft", record.digest(), deployment.tables(evidence, params)


def config_points(config: dict[str, Any], record: DraftRecord) -> tuple[int, ...]:
    """What the engine in the record makes of config.json's layer ids; none when it could not capture them."""
    from stages.capture.dialects import points_of
    from stages.contracts.errors import EngineError

    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    dialect, model_type = record.exported_for, record.target.model_type
    if dialect == "in_process":  # reads the ids as SGLang does for Llama and Qwen targets
        dialect, model_type = "sglang", ""
    try:
        return points_of(ids, dialect, model_type, record.target.layers)
    except EngineError:
        return ()


def look_at_tensors(path: Path) -> tuple[DataFrame, tuple[int, ...], frozenset[int]]:
    """Facts a tensor; d2t; the ids that t2d marks."""
    import pandas as pd
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        do = "export the draft again: `dvc repro train`"
        raise DataError("The draft's weights cannot be read", where=str(path), got=str(error), do=do) from error
    facts = [
        {
            "tensor": n,
            "shape": str(list(t.shape)),
            "dtype": str(t.dtype).removeprefix("torch."),
            "finite": bool(t.isfinite().all()),
        }
        for n, t in sorted(tensors.items())
    ]
    d2t = tuple(tensors["d2t"].flatten().tolist()) if "d2t" in tensors else ()
    marked = frozenset(tensors["t2d"].flatten().nonzero()[:, 0].tolist()) if "t2d" in tensors else frozenset()
    return pd.DataFrame(facts, columns=["tensor", "shape", "dtype", "finite"]), d2t, marked
