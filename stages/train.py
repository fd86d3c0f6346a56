"""train: an EAGLE-3 draft from stored rows; held-out accept length while it trains; exact resume."""

from __future__ import annotations

import csv
import dataclasses
import io
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor

from stages.acceptance.lengths import Answer, accept_length, by_domain
from stages.acceptance.simulate import replay_rows
from stages.capture.dialects import layer_ids
from stages.capture.store import RowStore
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import ParamsError, Refusal, run
from stages.contracts.evidence import TRAIN_CURVES, TRAIN_METRICS, AcceptLength, TrainMetrics
from stages.contracts.files import Fact, canonical, digest, file_digest, whole_folder, write_whole
from stages.contracts.manifest import HIDDEN_STATES, MERGED, MERGED_MANIFEST, MergedManifest, TargetIdentity
from stages.contracts.params import Params, load_params
from stages.contracts.progress import progress
from stages.contracts.report import GateReport, demand
from stages.drafts.eagle3 import (
    Ahead,
    BatchOrder,
    Eagle3,
    PackedBatch,
    ResumePoints,
    Schedule,
    Teacher,
    Trainer,
    check_vocabulary,
    export,
    look_ahead,
    start_draft,
)
from stages.targets import identify_target, load_target, locate_target

WORK = Path(".cache/train")
_LAYOUT = 1  # of resume points: part of their key, raised when their content changes meaning
_SHOWN_STEPS = 10  # a line of the training curve averages this many optimizer steps


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
    """Raises Refusal when states, merged rows and target do not belong together; DataError when a folder's bytes are not
    those that were written; ParamsError when params.yaml asks for a draft vocabulary that was not merged."""
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
                do=f"run `dvc repro {stage}`",
            )
    if merged.draft_vocab_size != params.merge.draft_vocab_size:
        raise ParamsError(
            "The merged draft vocabulary has another size than params.yaml asks for",
            where="params.yaml: merge.draft_vocab_size",
            expected=str(params.merge.draft_vocab_size),
            got=f"{merged.draft_vocab_size} in {MERGED_MANIFEST}",
            do="run `dvc repro merge`",
        )
    for folder in merged.folders:
        store.verify(folder.name)


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
            do="run `dvc repro merge`",
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


class HeldOut(Fact):
    """Held-out figures of one draft: mean KL in nats over roots, and accept length."""

    loss: float
    overall: AcceptLength
    by_domain: dict[str, AcceptLength]


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


class Curves:
    """What DVC plots: training.csv (a line every few steps, means over them) and held_out.csv (a line an evaluation)."""

    def __init__(self, steps_ahead: int, state: dict[str, Any] | None = None) -> None:
        self.training: list[dict[str, float]] = []
        self.held_out: list[dict[str, float]] = []
        self._sums = [0.0] * (2 + 2 * steps_ahead)  # steps, loss, hits and tries by draft step, since the last line
        if state:
            self.training, self.held_out, self._sums = state["training"], state["held_out"], state["sums"]

    def state(self) -> dict[str, Any]:
        return {"training": self.training, "held_out": self.held_out, "sums": self._sums}

    def trained(self, step: int, rate: float, loss: float, ahead: Ahead) -> None:
        """After `step` optimizer steps."""
        self._sums = [a + b for a, b in zip(self._sums, (1, loss, *ahead.hits, *ahead.tried), strict=True)]
        if step % _SHOWN_STEPS:
            return
        steps, total, *counts = self._sums
        hits, tried = counts[: len(ahead.hits)], counts[len(ahead.hits) :]
        accuracy = {f"accuracy_{i}": h / max(1, t) for i, (h, t) in enumerate(zip(hits, tried, strict=True), start=1)}
        self.training.append({"step": step, "loss": total / steps, "learning_rate": rate, **accuracy})
        self._sums = [0.0] * len(self._sums)

    def measured(self, step: int, found: HeldOut) -> None:
        """After an evaluation."""
        domains = {f"accept_length_{name}": a.accept_length for name, a in found.by_domain.items()}
        self.held_out.append(
            {"step": step, "loss": found.loss, "accept_length": found.overall.accept_length, **domains}
        )

    def write(self, folder: Path) -> None:
        for name, lines in (("training", self.training), ("held_out", self.held_out)):
            text = io.StringIO()
            columns = ["step", "loss", *sorted(set(lines[0] if lines else ()) - {"step", "loss"})]
            writer = csv.DictWriter(text, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: v if k == "step" else round(v, 6) for k, v in line.items()} for line in lines)
            write_whole(folder / f"{name}.csv", text.getvalue().encode())


class Best(Fact):
    """The best draft so far by held-out accept length; its weights are kept beside."""

    step: int
    roots_seen: int
    train_loss: float
    found: HeldOut


class Session:
    """One training run: what has been done, and how to go on from a resume point."""

    def __init__(self, trainer: Trainer, rows: Rows, params: Params, points: ResumePoints) -> None:
        self.trainer, self.rows, self.params, self.points = trainer, rows, params, points
        told = params.train
        self.order = BatchOrder([row.length for row in rows.train], told.batch_tokens, told.seed)
        self.curves, self.roots_seen = Curves(told.steps_ahead), 0
        self.best: Best | None = None
        self.best_weights: dict[str, Tensor] = {}

    def resume(self) -> None:
        """Go on from the last resume point, when there is one."""
        if (point := self.points.load()) is None:
            return
        step, tensors, state = point
        self.best_weights = {n.removeprefix("best."): t for n, t in tensors.items() if n.startswith("best.")}
        self.trainer.load(step, tensors)
        self.curves, self.roots_seen = Curves(self.params.train.steps_ahead, state["curves"]), state["roots_seen"]
        self.best = Best.model_validate(state["best"]) if state["best"] else None
        print(f"train: resumed after step {step}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write a resume point."""
        state = {"curves": self.curves.state(), "roots_seen": self.roots_seen}
        best = self.best.model_dump(mode="json") if self.best else None
        kept = {f"best.{n}": t for n, t in self.best_weights.items()}
        self.points.save(self.trainer.step, self.trainer.tensors() | kept, state | {"best": best})

    def measure(self, loss: float) -> HeldOut:
        """Evaluate the averaged weights on the held-out rows; keep them when they are the best so far."""
        draft = self.trainer.averaged()
        found = evaluate(draft, self.trainer.teacher, self.rows, self.params)
        self.curves.measured(self.trainer.step, found)
        if self.best is None or found.overall.accept_length > self.best.found.overall.accept_length:
            self.best = Best(step=self.trainer.step, roots_seen=self.roots_seen, train_loss=loss, found=found)
            self.best_weights = {n: t.clone() for n, t in draft.state_dict().items()}
        return found

    def run(self) -> Best:
        """Train to the end, or from the resume point to the end."""
        told, started, seen, accepted = self.params.train, time.monotonic(), 0, ""
        with progress(told.optimizer_steps, "train", "steps") as advance:
            advance(self.trainer.step)
            while self.trainer.step < told.optimizer_steps:
                batch = self.rows.pack([self.rows.train[i] for i in self.order(self.trainer.step)])
                rate = self.trainer.schedule.rate(self.trainer.step)
                ahead = self.trainer.train(batch)
                step, loss = self.trainer.step, float(ahead.loss.detach())
                self.roots_seen, seen = self.roots_seen + len(ahead.roots), seen + len(ahead.roots)
                self.curves.trained(step, rate, loss, ahead)
                last = step == told.optimizer_steps
                if last or step % told.evaluate_every == 0:
                    accepted = f"held-out accept length {self.measure(loss).overall.accept_length:.3f}"
                if step % told.checkpoint_every == 0 and not last:
                    self.save()
                speed = seen / (time.monotonic() - started)
                advance(1, f"loss {loss:.3f} {accepted} {speed:.0f} tokens/s")
        assert self.best is not None
        return self.best

    def best_draft(self) -> Eagle3:
        """The draft to export."""
        draft = self.trainer.averaged()
        draft.load_state_dict(self.best_weights)
        return draft


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
    target = load_target(folder, params.target.device)
    rows, told = read_rows(store, target.device), params.train
    draft, teacher = start_draft(
        target,
        d2t + torch.arange(len(d2t)),
        heads=told.heads,
        kv_heads=told.kv_heads,
        head_dim=told.head_dim,
        intermediate_size=told.intermediate_size,
        seed=told.seed,
    )
    del target
    trainer = Trainer(draft, teacher, schedule_of(params))
    session = Session(trainer, rows, params, ResumePoints(work_folder(params, merged)))
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
