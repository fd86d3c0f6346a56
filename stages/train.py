"""train: an EAGLE-3 draft from stored rows; held-out accept length while it trains; exact resume."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages._train_judge import evaluate, improves
from stages._train_processes import beside
from stages._train_rows import Rows, demand_same_data, read_rows, read_vocabulary
from stages._train_start import Start, find_start, go_on_from, vocabulary_of
from stages.capture.dialects import layer_ids
from stages.capture.store import RowStore
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord, DraftStart
from stages.contracts.errors import run
from stages.contracts.evidence import TRAIN_CURVES, TRAIN_METRICS, TrainMetrics
from stages.contracts.files import canonical, digest, file_digest, whole_folder
from stages.contracts.manifest import HIDDEN_STATES, MERGED_MANIFEST, MergedManifest
from stages.contracts.params import Params, load_params
from stages.contracts.report import GateReport, demand
from stages.drafts.eagle3 import (
    BatchOrder,
    Best,
    Board,
    Eagle3,
    Group,
    ResumePoints,
    Rhythm,
    Schedule,
    Session,
    Teacher,
    Trainer,
    demand_tensorboard,
    export,
    join,
    leave,
    match_scales,
    start_draft,
)
from stages.targets import identify_target, load_target, locate_target

WORK = Path(".cache/train")
BOARD = Path("logs/tensorboard")  # a folder a run, named as its resume points
_LAYOUT = 3  # of resume points: part of their key, raised when their content changes meaning
SCALED_BY = 16  # training rows whose states tell how large states are
# Settings that do not decide what a run comes to.
_ANY = ("processes", "shard_weights", "recompute_steps", "tensorboard", "checkpoint_every")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run is made of, read and checked."""

    params: Params
    merged: MergedManifest
    gate: GateReport
    rows: Rows
    draft: Eagle3
    teacher: Teacher
    vocabulary: tuple[Tensor, Tensor]
    start: DraftStart | None


def read_inputs(params: Params, device: str) -> Inputs:
    """Everything a run needs, or the reason why there is none.

    Raises:
        LineError: what does not belong together, is missing or damaged, in words.
    """
    merged, told = MergedManifest.read(MERGED_MANIFEST), params.train
    gate = demand("training", merged.digest())
    store, folder = RowStore(HIDDEN_STATES), locate_target(params.target.origin)
    demand_same_data(merged, store, identify_target(folder, params.target.name), params)
    start = find_start(params, merged)
    d2t_merged, t2d_merged = read_vocabulary(merged)
    d2t, t2d = vocabulary_of(start, (d2t_merged, t2d_merged), params)
    target = load_target(folder, device, stored=True)  # embedding, head and last layer are all that is read
    rows = read_rows(store, target.device)
    names = (
        "heads",
        "kv_heads",
        "head_dim",
        "intermediate_size",
        "norms",
        "seed",
        "head",
        "loss",
        "chains",
        "products",
    )
    draft, teacher = start_draft(target, target_ids(d2t), **{n: getattr(told, n) for n in (*names, "recompute_steps")})
    if told.norms and not start:
        match_scales(draft, rows.pack(rows.train[:SCALED_BY]).aux)
    carried = go_on_from(start, draft, teacher, rows, target_ids(d2t_merged), params) if start else None
    _say_start(start, carried, params)
    return Inputs(params, merged, gate, rows, draft, teacher, (d2t, t2d), carried)


def target_ids(d2t: Tensor) -> Tensor:
    """Target id of every draft id, from the offsets."""
    return d2t + torch.arange(len(d2t))


def _say_start(start: Start | None, carried: DraftStart | None, params: Params) -> None:
    if start and carried:
        share = f"{carried.coverage_train:.1%} of the training tokens can be said"
        print(f"train: goes on from {start.folder}; {carried.ids_new} ids are new, {share}", file=sys.stderr)
    elif params.train.start_from:
        print("train: there is no release yet, so training starts from the target", file=sys.stderr)


def write_draft(draft: Eagle3, best: Best, inputs: Inputs) -> DraftRecord:
    """models/draft as a whole, the record last in it."""
    params, merged = inputs.params, inputs.merged
    draft = draft.to(getattr(torch, params.train.export_dtype))
    ids = layer_ids(merged.capture.points, "sglang", merged.target.model_type)
    with whole_folder(DRAFT) as folder:
        export(draft, folder, ids, *inputs.vocabulary)
        record = DraftRecord(
            target=merged.target,
            capture=merged.capture,
            merged_digest=merged.digest(),
            gate_training_digest=inputs.gate.digest(),
            params_digest=digest(canonical(params.train.model_dump(mode="json"))),
            steps_ahead=params.train.steps_ahead,
            draft_vocab_size=draft.config.draft_vocab_size,
            optimizer_steps=best.step,
            supervised_tokens_seen=best.roots_seen,
            exported_for=params.serve.engine,
            layer_ids=ids,
            weights_digest=file_digest(folder / "model.safetensors"),
            config_digest=file_digest(folder / "config.json"),
            norms=draft.config.norms,
            start=inputs.start,
        )
        record.write(folder / DRAFT_RECORD)
    return record


def schedule_of(params: Params) -> Schedule:
    """What the optimizer is told."""
    return Schedule(**{field.name: getattr(params.train, field.name) for field in dataclasses.fields(Schedule)})


def resume_points(inputs: Inputs) -> ResumePoints:
    """Where this run's resume points lie: equal settings, data, vocabulary and start, equal folder."""
    settings = inputs.params.train.model_dump(mode="json")
    deciding: dict[str, Any] = {f"train.{name}": value for name, value in settings.items() if name not in _ANY}
    deciding |= {
        "layout": _LAYOUT,
        "the merged rows": inputs.merged.digest(),
        "the draft vocabulary": digest(inputs.vocabulary[0].numpy().tobytes()),
        "the start": inputs.start.draft_digest if inputs.start else "the target",
        "the products": str(inputs.teacher.products).removeprefix("torch."),  # what auto came to
        "the device": inputs.rows.device.type,
    }
    return ResumePoints(WORK / digest(canonical(deciding)).removeprefix("sha256:")[:24], deciding)


@torch.no_grad()
def as_exported(draft: Eagle3, dtype: str) -> Eagle3:
    """The draft, its weights rounded as its files will have them: what is measured, kept and exported is one thing."""
    for parameter in draft.parameters():
        parameter.copy_(parameter.to(getattr(torch, dtype)))
    return draft


def session_of(inputs: Inputs, group: Group) -> Session:
    """The run, at its start or at its last resume point."""
    params, rows, told = inputs.params, inputs.rows, inputs.params.train
    if told.shard_weights:
        group.shard(inputs.draft, inputs.teacher)
    session = Session(
        Trainer(inputs.draft, inputs.teacher, schedule_of(params), group),
        resume_points(inputs),
        BatchOrder([row.length for row in rows.train], told.batch_tokens, told.seed),
        [row.row_id for row in rows.train],
        pack=lambda numbers: rows.pack([rows.train[i] for i in numbers]),
        evaluate=lambda draft: evaluate(as_exported(draft, told.export_dtype), inputs.teacher, rows, params, group),
        improves=improves,
        rhythm=Rhythm(**{field.name: getattr(told, field.name) for field in dataclasses.fields(Rhythm)}),
        read_ahead=rows.device.type != "cpu",  # on a CPU it would take what it spares
    )
    session.resume()
    if told.tensorboard and group.first:  # a resume point that is refused leaves the run's event files alone
        session.show = Board(BOARD / session.points.root.name).show
    if group.first:
        for folder, differing in session.points.others():
            print(f"train: left alone: an unfinished run in {folder} ({'; '.join(differing)})", file=sys.stderr)
    return session


def write_metrics(session: Session, best: Best, record: DraftRecord) -> None:
    """reports/train.json, and the curves."""
    schedule, step = session.trainer.schedule, session.trainer.step
    session.curves.write(TRAIN_CURVES)
    TrainMetrics(
        draft_digest=record.digest(),
        train_loss=best.train_loss,
        held_out_loss=best.found.loss,
        overall=best.found.overall,
        by_domain=best.found.by_domain,
        optimizer_steps=best.step,
        parameters=sum(p.numel() for p in session.trainer.draft.parameters()),
        train_like=best.found.train_like,
        stopped_after=step if step < schedule.optimizer_steps else None,
    ).write(TRAIN_METRICS)


def train(params: Params) -> None:
    """One process's part of the run; the first writes what comes of it."""
    group = join(torch.device(params.target.device))
    torch.set_num_threads(max(1, params.target.threads // group.size))
    if params.train.tensorboard:
        demand_tensorboard(BOARD)
    inputs = read_inputs(params, params.target.device)
    session = session_of(inputs, group)
    group.wait()  # before the first removes or replaces what the others read
    best = session.run()
    draft = session.best_draft()
    if group.first:
        write_metrics(session, best, write_draft(draft, best, inputs))
        session.points.clear()


def main() -> None:
    params = load_params()
    with beside(params.train.processes):
        try:
            train(params)
        finally:
            leave()


if __name__ == "__main__":
    run(main)
