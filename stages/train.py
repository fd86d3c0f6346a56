"""train: an EAGLE-3 draft from stored rows; held-out accept length while it trains; exact resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor

from stages.acceptance.lengths import Answer, accept_length, by_domain
from stages.acceptance.simulate import replay_rows
from stages.capture.dialects import layer_ids
from stages.capture.store import RowStore
from stages.capture.verify import REPAIR, apart, captured_folder
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError, ParamsError, Refusal, run
from stages.contracts.evidence import TRAIN_CURVES, TRAIN_METRICS, TrainMetrics
from stages.contracts.files import canonical, digest, file_digest, whole_folder
from stages.contracts.manifest import HIDDEN_STATES, MERGED, MERGED_MANIFEST, MergedManifest, TargetIdentity, renewal
from stages.contracts.params import Params, load_params
from stages.contracts.report import GateReport, demand
from stages.drafts.eagle3 import (
    BatchOrder,
    Best,
    Eagle3,
    HeldOut,
    PackedBatch,
    ResumePoints,
    Schedule,
    Session,
    Teacher,
    Trainer,
    check_vocabulary,
    export,
    look_ahead,
    start_draft,
)
from stages.targets import identify_target, load_target, locate_target

WORK = Path(".cache/train")
_LAYOUT = 3  # of resume points: part of their key, raised when their content changes meaning


@dataclass(frozen=True)
class IndexRow:
    """A line of data/merged/index.parquet, as far as training looks."""

    row_id: str
    domain: str
    folder: str
    row_in_folder: int
    length: int
    prompt_tokens: int


@dataclass(frozen=True)
class Rows:
    """Stored rows of both splits; a batch is read from the mapped files when it is asked for."""

    store: RowStore
    train: tuple[IndexRow, ...]
    held_out: tuple[IndexRow, ...]
    device: torch.device

    def pack(self, rows: Sequence[IndexRow]) -> PackedBatch:
        parts = [self.store.row(row.folder, row.row_in_folder) for row in rows]
        states = torch.cat([states for states, _, _ in parts]).to(self.device).float()
        return PackedBatch(
            row_ids=tuple(row.row_id for row in rows),
            lengths=tuple(row.length for row in rows),
            input_ids=torch.cat([ids for _, ids, _ in parts]).to(self.device).long(),
            loss_mask=torch.cat([mask for _, _, mask in parts]).to(self.device).bool(),
            aux=states[:, :-1].flatten(1),
            last=states[:, -1].contiguous(),
        )


def demand_same_data(merged: MergedManifest, store: RowStore, target: TargetIdentity, params: Params) -> None:
    """Raises Refusal when states, merged rows and target do not belong together; DataError when a folder is not the one
    that was merged; ParamsError when params.yaml asks for a draft vocabulary that was not merged."""
    capture = store.manifest()
    pairs = (
        ("hidden states", HIDDEN_STATES, merged.capture_digest, capture.digest(), "merge"),
        ("the target's weights", "target.origin", merged.target.weights_digest, target.weights_digest, "prepare"),
        ("the tokenizer", "target.origin", merged.target.tokenizer_digest, target.tokenizer_digest, "prepare"),
        ("index", MERGED / "index.parquet", merged.index_digest, file_digest(MERGED / "index.parquet"), "merge"),
    )
    for what, where, expected, got, stage in pairs:
        if expected != got:
            raise Refusal(
                f"The merged rows belong to other bytes: {what}",
                where=str(where),
                expected=f"{expected}, as in {MERGED_MANIFEST}",
                got=got,
                do=renewal(MERGED / "index.parquet", stage) if what == "index" else f"run `dvc repro {stage}`",
            )
    if merged.draft_vocab_size != params.merge.draft_vocab_size:
        raise ParamsError(
            "The merged draft vocabulary has another size than params.yaml asks for",
            where="params.yaml: merge.draft_vocab_size",
            expected=str(params.merge.draft_vocab_size),
            got=f"{merged.draft_vocab_size} in {MERGED_MANIFEST}",
            do="run `dvc repro merge`",
        )
    for folder in merged.folders:  # their bytes are checked when they are first read
        if (found := captured_folder(store.folder(folder.name).config)) != folder:
            expected, got = apart(folder, found)
            where = str(store.root / folder.name)
            raise DataError(
                "A folder is not the one that was merged", where=where, expected=expected, got=got, do=REPAIR
            )


def read_vocabulary(merged: MergedManifest) -> tuple[Tensor, Tensor]:
    """d2t i64 offsets [D] and t2d bool [V].

    Raises:
        Refusal: not the file the manifest digested.
        DataError: the two contradict each other.
    """
    path = MERGED / "vocabulary.safetensors"
    if (got := file_digest(path)) != merged.vocabulary_digest:
        raise Refusal(
            "The draft vocabulary is not the one that was merged",
            where=str(path),
            expected=merged.vocabulary_digest,
            got=got,
            do=renewal(path, "merge"),
        )
    tensors = load_file(path)
    check_vocabulary(tensors["d2t"], tensors["t2d"], str(path))
    return tensors["d2t"], tensors["t2d"]


def read_rows(store: RowStore, device: torch.device) -> Rows:
    """Rows of the index that have something to learn or to measure, in its order."""
    columns = ["row_id", "domain", "folder", "row_in_folder", "length", "prompt_tokens", "split", "supervised_tokens"]
    table = pq.read_table(MERGED / "index.parquet", columns=columns).to_pylist()
    split: dict[str, list[IndexRow]] = {"train": [], "held_out": []}
    for record in table:
        supervised, name = record.pop("supervised_tokens"), record.pop("split")
        if supervised > 1 or name == "held_out":
            split[name].append(IndexRow(**record))
    for name, rows in split.items():
        if not rows:
            raise Refusal(
                f"No {name.replace('_', '-')} rows with a supervised pair",
                where=str(MERGED / "index.parquet"),
                expected="at least one in either split",
                do="give prepare more prompts",
            )
    return Rows(store, tuple(split["train"]), tuple(split["held_out"]), device)


@torch.no_grad()
def evaluate(draft: Eagle3, teacher: Teacher, rows: Rows, params: Params) -> HeldOut:
    """Simulate every held-out row's first answer as the server would decode it."""
    told, total, roots = params.train, 0.0, 0
    answers: list[Answer] = []
    at_once = max(1, told.batch_tokens // max(row.length for row in rows.held_out))
    for at in range(0, len(rows.held_out), at_once):
        members = rows.held_out[at : at + at_once]
        batch = rows.pack(members)
        ahead = look_ahead(draft, teacher, batch, told.steps_ahead, told.step_decay)
        total, roots = total + float(ahead.loss) * len(ahead.roots), roots + len(ahead.roots)
        ids, mask = batch.input_ids.tolist(), batch.loss_mask.tolist()
        prompts = [row.prompt_tokens for row in members]
        answers += replay_rows(ids, mask, batch.lengths, prompts, ahead.roots.tolist(), ahead.drafted.tolist())
    domains = [row.domain for row in rows.held_out]
    overall = accept_length(answers, told.steps_ahead, told.seed)
    return HeldOut(
        loss=total / max(1, roots),
        overall=overall,
        by_domain=by_domain(answers, domains, told.steps_ahead, told.seed),
    )


def write_draft(
    session: Session,
    best: Best,
    params: Params,
    merged: MergedManifest,
    gate: GateReport,
    vocabulary: tuple[Tensor, Tensor],
) -> DraftRecord:
    """models/draft as a whole, the record last in it."""
    draft = session.best_draft()
    ids = layer_ids(merged.capture.points, "sglang", merged.target.model_type)
    with whole_folder(DRAFT) as folder:
        export(draft, folder, ids, *vocabulary)
        record = DraftRecord(
            target=merged.target,
            capture=merged.capture,
            merged_digest=merged.digest(),
            gate_training_digest=gate.digest(),
            params_digest=digest(canonical(params.train.model_dump(mode="json"))),
            steps_ahead=params.train.steps_ahead,
            draft_vocab_size=draft.config.draft_vocab_size,
            optimizer_steps=best.step,
            supervised_tokens_seen=best.roots_seen,
            exported_for=params.serve.engine,
            layer_ids=ids,
            weights_digest=file_digest(folder / "model.safetensors"),
            config_digest=file_digest(folder / "config.json"),
        )
        record.write(folder / DRAFT_RECORD)
    return record


def schedule_of(params: Params) -> Schedule:
    """What the optimizer is told."""
    return Schedule(**{field.name: getattr(params.train, field.name) for field in dataclasses.fields(Schedule)})


def work_folder(params: Params, merged: MergedManifest) -> Path:
    """Where this run's resume points lie: equal settings and equal data, equal folder."""
    deciding = {"layout": _LAYOUT, "train": params.train.model_dump(mode="json"), "merged": merged.digest()}
    return WORK / digest(canonical(deciding)).removeprefix("sha256:")[:24]


def main() -> None:
    params = load_params()
    merged = MergedManifest.read(MERGED_MANIFEST)
    gate = demand("training", merged.digest())
    torch.set_num_threads(params.target.threads)
    store, folder = RowStore(HIDDEN_STATES), locate_target(params.target.origin)
    demand_same_data(merged, store, identify_target(folder, params.target.name), params)
    d2t, t2d = read_vocabulary(merged)
    target = load_target(
        folder, params.target.device, stored=True
    )  # embedding, head and last layer are all that is read
    rows, told = read_rows(store, target.device), params.train
    draft, teacher = start_draft(
        target,
        d2t + torch.arange(len(d2t)),
        heads=told.heads,
        kv_heads=told.kv_heads,
        head_dim=told.head_dim,
        intermediate_size=told.intermediate_size,
        seed=told.seed,
        head=told.head,
        loss=told.loss,
        products=told.products,
    )
    del target
    trainer = Trainer(draft, teacher, schedule_of(params))
    session = Session(
        trainer,
        ResumePoints(work_folder(params, merged)),
        BatchOrder([row.length for row in rows.train], told.batch_tokens, told.seed),
        pack=lambda numbers: rows.pack([rows.train[i] for i in numbers]),
        evaluate=lambda draft: evaluate(draft, teacher, rows, params),
        evaluate_every=told.evaluate_every,
        checkpoint_every=told.checkpoint_every,
    )
    session.resume()
    best = session.run()
    record = write_draft(session, best, params, merged, gate, (d2t, t2d))
    session.curves.write(TRAIN_CURVES)
    TrainMetrics(
        draft_digest=record.digest(),
        train_loss=best.train_loss,
        held_out_loss=best.found.loss,
        overall=best.found.overall,
        by_domain=best.found.by_domain,
        optimizer_steps=best.step,
        parameters=sum(p.numel() for p in draft.parameters()),
    ).write(TRAIN_METRICS)
    session.points.clear()


if __name__ == "__main__":
    run(main)
