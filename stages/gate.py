"""gate: judge what stands before a spend. `python -m stages.gate extraction | training | deployment`

Gathers plain tables (this file alone knows where they come from), lets stages/gates judge them, writes the report, and
exits 1 on a refusal; whatever was made before stays.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord, read_draft_config
from stages.contracts.errors import DataError, LineError, Refusal, run
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
from stages.contracts.manifest import (
    HIDDEN_STATES,
    MERGED,
    MERGED_MANIFEST,
    PREPARED,
    PREPARED_MANIFEST,
    CapturedFolder,
    CaptureManifest,
    MergedManifest,
    PreparedManifest,
    StoredForm,
    renewal,
)
from stages.contracts.params import Params, load_params
from stages.contracts.progress import progress
from stages.contracts.quality import (
    ACCEPTED_DATASET,
    PREPARED_QUALITY,
    AcceptedDataset,
    PreparedQuality,
    accept,
    earlier_than,
)
from stages.contracts.release import current_record
from stages.contracts.report import GateName, GateReport, evidence_digests, report_path
from stages.corpus.rendering import Renderer
from stages.gates import deployment, extraction, training
from stages.gates._joined import Stored, always_there, blank_folder, chain, coverage, join_rows
from stages.gates._judge import Table, judge, summary
from stages.reporting.page import write_page
from stages.targets import expect_rows, identify_target, locate_target, open_target

if TYPE_CHECKING:
    from pandas import DataFrame

    from stages.capture.probe import NormProbe, ProbeRow
    from stages.capture.store import RowFolder, RowStore
    from stages.targets._decoder import Decoder

PROBE_TOKENS = 512  # of a row; states of a prefix do not depend on what follows
MOST_PROBED = 64  # folders of which a row goes through the target again: minutes on a small target, and no more
Gathered = tuple[str, str, list[Table]]  # subject, its digest, tables


def gather_extraction(params: Params) -> Gathered:
    """Prepared rows and their files."""
    import pandas as pd

    manifest = PreparedManifest.read(PREPARED_MANIFEST)
    quality = PreparedQuality.read(PREPARED_QUALITY)
    folder = locate_target(params.target.origin)
    renderer = Renderer(folder, params.prepare.rendering)
    evidence = extraction.Evidence(
        manifest=manifest,
        rows=prepared_rows(manifest),
        files=pd.DataFrame(
            [
                {
                    "file": str(path),
                    "recorded": recorded,
                    "found": file_digest(path) if path.exists() else "no such file",
                }
                for path, recorded in [
                    *((PREPARED / s.name / "rows.parquet", s.rows_digest) for s in manifest.sources),
                    (PREPARED / "out_of_distribution.parquet", manifest.out_of_distribution_digest),
                    (PREPARED / "rejects.parquet", manifest.rejects_digest),
                ]
            ]
        ),
        target=identify_target(folder, params.target.name),
        template_prefix=renderer.opening(),
        bos_id=renderer.bos_id,
        quality=quality,
        earlier=earlier_than(quality, accepted_dataset()),
    )
    try:
        tables = extraction.tables(evidence, params)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        other = evidence.files[evidence.files["recorded"] != evidence.files["found"]]
        if other.empty:  # then it is no damage
            raise
        name, recorded, found = other.iloc[0][["file", "recorded", "found"]]
        raise _damaged(Path(name), recorded, found) from error
    return "prepared rows", manifest.digest(), tables


def accepted_dataset() -> AcceptedDataset | None:
    """The rows that gate-extraction let pass last."""
    return AcceptedDataset.read(ACCEPTED_DATASET) if ACCEPTED_DATASET.exists() else None


def _damaged(path: Path, expected: str, got: str) -> DataError:
    stage = "merge" if path.is_relative_to(MERGED) else "prepare"
    return DataError(
        "A file is not the one that its manifest speaks of, and cannot be judged",
        where=str(path),
        expected=expected,
        got=got,
        do=renewal(path, stage),
    )


def demand_bytes(path: Path, expected: str) -> None:
    """Raises DataError when a file is missing or not the one that its manifest digests."""
    if (got := file_digest(path)) != expected:
        raise _damaged(path, expected, got)


def prepared_rows(manifest: PreparedManifest) -> DataFrame:
    """Rows of all sources, one below the other. A file that is missing is the files table's business, and so is one that
    was changed and can be read.

    Raises:
        DataError: a changed file that cannot be read, or no file at all.
    """
    import pandas as pd
    from pyarrow.lib import ArrowException

    frames: list[DataFrame] = []
    for source in manifest.sources:
        path = PREPARED / source.name / "rows.parquet"
        if not path.exists():
            continue
        try:
            frames.append(pd.read_parquet(path))
        except (ArrowException, OSError, TypeError, ValueError) as error:
            raise _damaged(path, source.rows_digest, f"{file_digest(path)}: {error}"[:400]) from error
    if not frames:
        raise DataError("There are no prepared rows", where=str(PREPARED), do="run `dvc repro prepare`")
    return pd.concat(frames, ignore_index=True)


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
    slots, last = probe(target, chosen, params, greedy, merged.capture.form)
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


def look_at_folders(folders: Sequence[CapturedFolder], store: RowStore, rows: DataFrame) -> tuple[DataFrame, Stored]:
    """Facts a folder, and facts a stored row by row id. A folder that cannot be opened is a fact too."""
    import pandas as pd
    import torch

    from stages.capture.probe import row_faults
    from stages.capture.verify import found_digest

    wanted = {
        r: (torch.tensor(i), torch.tensor(m))
        for r, i, m in zip(rows["row_id"], rows["input_ids"], rows["loss_mask"], strict=True)
    }
    facts: list[dict[str, Any]] = []
    stored: Stored = {}
    with progress(sum(f.tokens for f in folders), "gate-training: stored states", "tokens") as advance:
        for f in folders:
            fact = blank_folder(f)
            facts.append(fact)
            fact["found_digest"] = found_digest(store.root / f.name)
            try:
                opened = store.folder(f.name)
            except DataError as error:
                fact["fault"] = f"{error.what} ({error.got})"
                continue
            spec, (T, S, H) = opened.config.capture, opened.shape
            fact |= {"found_config": opened.config.digest(), "capture": spec.digest(), "slots": S, "width": H}
            fact |= {"rows_stored": len(opened), "tokens_stored": T, "dtype": _name_of(opened.dtype)}
            members = (_probe_row(opened, i) for i in range(len(opened)))
            for i, fault in enumerate(row_faults(f.name, members, wanted)):
                at = {"row_in_folder": i, "offset": int(opened.offsets[i])}
                stored.setdefault(fault.row_id, []).append({**vars(fault), **at})
            advance(f.tokens)
    return pd.DataFrame(facts), stored


def _probe_row(folder: RowFolder, i: int) -> ProbeRow:
    """Row `i` as it lies on the disk: damaged bytes are the folders table's business."""
    from stages.capture.probe import ProbeRow

    states, ids, mask = folder.view(i)
    return ProbeRow(folder.config.row_ids[i], ids, mask, states, folder.kept(i))


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def choose_rows(
    store: RowStore, folders: Sequence[CapturedFolder], stored: Stored, params: Params
) -> dict[str, list[ProbeRow]]:
    """A sample by hash, by folder: the same rows for the same data, and no folder twice before all once.

    Every folder gives a row, up to MOST_PROBED folders: any of them alone may have been captured wrong. A folder whose
    states have another shape is left to the folders table.
    """

    def rank(row_id: str) -> str:
        return hashlib.sha256(f"probe {row_id}".encode()).hexdigest()

    shape = (len(params.capture.points) + 1, params.target.hidden_size)
    fits = {f.name for f in folders if _shape_of(store, f.name) == shape}
    by_folder: dict[str, list[str]] = {f.name: [] for f in folders}
    for row_id in sorted((r for r, s in stored.items() if s[0]["tokens"] > 1 and s[0]["folder"] in fits), key=rank):
        by_folder[stored[row_id][0]["folder"]].append(row_id)
    order = sorted((ids for ids in by_folder.values() if ids), key=lambda ids: rank(ids[0]))
    turns = [ids[turn] for turn in range(max(map(len, order), default=0)) for ids in order if len(ids) > turn]
    chosen: dict[str, list[ProbeRow]] = {}
    for row_id in turns[: max(params.gates.training.probe_rows, min(len(order), MOST_PROBED))]:
        at = stored[row_id][0]
        row = _probe_row(store.folder(at["folder"]), at["row_in_folder"])
        chosen.setdefault(at["folder"], []).append(row)
    if not chosen:
        raise DataError(
            "No stored row can be read, so no layer can be proved",
            where=str(HIDDEN_STATES),
            expected=f"rows of two tokens or more, {shape[0]} states of {shape[1]} values a token",
            do="run `dvc repro extract`",
        )
    return {f.name: chosen[f.name] for f in folders if f.name in chosen}


def _shape_of(store: RowStore, folder: str) -> tuple[int, ...]:
    """Slots and width of a folder's states; none when it cannot be opened, which the folders table says."""
    try:
        return store.folder(folder).shape[1:]
    except DataError:
        return ()


def probe(
    target: Decoder, rows: dict[str, list[ProbeRow]], params: Params, greedy: bool, form: StoredForm
) -> tuple[DataFrame, dict[str, Any]]:
    """Each slot of each folder against every point of the target, and the last state before and after the final norm."""
    import pandas as pd

    from stages.capture.forms import as_stored
    from stages.capture.probe import probe_norm, probe_rows

    slots: list[dict[str, Any]] = []
    norms: list[tuple[str, NormProbe]] = []
    with progress(sum(map(len, rows.values())), "gate-training: target run again", "rows") as advance:
        ids = [row.input_ids[:PROBE_TOKENS] for members in rows.values() for row in members]
        expect_rows(target, ids, lambda layers: advance(0, f"layer {layers} of {target.config.layers}"))
        for folder, members in rows.items():
            stored = partial(as_stored, form=form)
            probes = probe_rows(target, members, params.capture.points, PROBE_TOKENS, stored)
            slots += [{**vars(s), "folder": folder, "slot": f"{folder} slot {s.slot}"} for s in probes]
            norms += [(folder, probe_norm(target, [row], PROBE_TOKENS)) for row in members]
            advance(len(members), folder)
    return pd.DataFrame(slots), read_last(norms, greedy)


def read_last(norms: Sequence[tuple[str, NormProbe]], greedy: bool) -> dict[str, Any]:
    """The last state in one line: distance and likelihood of the rows that disagree most, agreement over all rows.

    One token of a short answer is a large share of it, so agreement alone is counted over all. For answers that were
    sampled or given, whose tokens need not be the target's first choice, it is agreement with the target run again.
    """
    far_at, far = max(norms, key=lambda n: n[1].before_distance / max(n[1].after_distance, 1e-30))
    odd_at, odd = max(norms, key=lambda n: _gap(n[1]))
    tokens = sum(n.tokens for _, n in norms)
    agreed = sum((n.before_agreement if greedy else n.own_agreement) * n.tokens for _, n in norms)
    return {
        "distance_folder": far_at,
        "before_distance": far.before_distance,
        "after_distance": far.after_distance,
        "likelihood_folder": odd_at,
        "before_nll": odd.before_nll,
        "after_nll": odd.after_nll,
        "target_nll": odd.target_nll,
        "argmax_agreement": agreed / max(tokens, 1),
        "tokens": tokens,
    }


def _gap(norm: NormProbe) -> float:
    """Nats a token between stored and recomputed state; what is no number is the widest gap."""
    gap = abs(norm.before_nll - norm.target_nll)
    return gap if gap == gap else float("inf")


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
        {"tensor": n, "shape": str(list(t.shape)), "dtype": _name_of(t.dtype), "finite": bool(t.isfinite().all())}
        for n, t in sorted(tensors.items())
    ]
    d2t = tuple(tensors["d2t"].flatten().tolist()) if "d2t" in tensors else ()
    marked = frozenset(tensors["t2d"].flatten().nonzero()[:, 0].tolist()) if "t2d" in tensors else frozenset()
    return pd.DataFrame(facts, columns=["tensor", "shape", "dtype", "finite"]), d2t, marked


GATHER: dict[str, Callable[[Params], Gathered]] = {
    "extraction": gather_extraction,
    "training": gather_training,
    "deployment": gather_deployment,
}


def choose(arguments: Sequence[str]) -> GateName:
    """The one selector on the command line.

    Raises:
        LineError: none, or not a gate.
    """
    names = get_args(GateName)
    if len(arguments) != 1 or arguments[0] not in names:
        raise LineError(
            "Which gate?",
            where="command line",
            expected=f"one of {', '.join(names)}",
            got=" ".join(arguments) or "nothing",
        )
    return next(n for n in names if n == arguments[0])


def main() -> None:
    gate = choose(sys.argv[1:])
    report_path(gate).unlink(missing_ok=True)  # what cannot be judged must not stand as passed
    params = load_params()
    subject, digest, tables = GATHER[gate](params)
    report = judge(gate, subject, digest, tables)
    if gate == "deployment":
        report = report.model_copy(update={"evidence": evidence_digests()})
    report.write(report_path(gate))
    if gate == "extraction" and report.success:
        accept(PreparedQuality.read(PREPARED_QUALITY), accepted_dataset()).write(ACCEPTED_DATASET)
    if gate == "deployment" or not report.success:
        write_page()
    print(summary(report))
    failed = [c.assertion for c in report.checks if not c.success]
    if failed:
        raise Refusal(
            f"gate-{gate}: {len(failed)} of {len(report.checks)} checks failed",
            where=str(report_path(gate)),
            expected="every check passes before more is spent",
            got="; ".join(failed),
            do="do what each failed check says, then `dvc repro`; reports/index.html shows them all",
        )


if __name__ == "__main__":
    run(main)
