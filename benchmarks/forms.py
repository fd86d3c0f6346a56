"""What smaller forms of stored states save, and what they cost in accept length.

    python -m benchmarks.forms

Needs a merged set in the default form (`dvc repro merge`); changes nothing. Its rows are written again in each form, a draft
is trained for STEPS optimizer steps on each, from the same start and over the same batches, and its held-out accept length
is simulated on the states of the default form: a server feeds what the target computes, not what was stored. Forms that only
leave out what training never looks at must give the very draft of the default form; `float8_e4m3` need not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stages._train_judge import evaluate
from stages._train_rows import read_rows, read_vocabulary
from stages.capture.layout import ROWS
from stages.capture.rows import FolderPlan, Row
from stages.capture.store import RowFolder, RowStore, write_folder
from stages.contracts.manifest import HIDDEN_STATES, MERGED_MANIFEST, MergedManifest, StoredForm
from stages.contracts.params import Params, load_params
from stages.drafts.eagle3 import BatchOrder, HeldOut, Trainer, start_draft
from stages.targets import load_target, locate_target
from stages.train import schedule_of

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

STEPS = 60
FORMS = {
    "default": StoredForm(),
    "to_last_supervised": StoredForm(tokens="to_last_supervised"),
    "before_supervised": StoredForm(last="before_supervised"),
    "float8_e4m3": StoredForm(aux_dtype="float8_e4m3"),
    "all three": StoredForm(tokens="to_last_supervised", last="before_supervised", aux_dtype="float8_e4m3"),
}
LOSSLESS = ("to_last_supervised", "before_supervised")


def plan_of(folder: RowFolder) -> FolderPlan:
    """The rows of a stored folder."""
    parts = [folder.row(i) for i in range(len(folder))]
    rows = [Row(r, p[1].numpy(), p[2].numpy()) for r, p in zip(folder.config.row_ids, parts, strict=True)]
    return FolderPlan(folder.config.source, folder.config.start, tuple(rows))


def write_form(merged: MergedManifest, form: StoredForm, to: Path) -> float:
    """The merged set's folders again, in another form; bytes a token."""
    spec, size = merged.capture.model_copy(update={"form": form}), 0
    for f in merged.folders:
        folder = RowFolder(HIDDEN_STATES / f.name)
        plan = plan_of(folder)
        write_folder(to / f.name, plan, spec, (folder.row(i)[0] for i in range(len(folder))))
        size += (to / f.name / ROWS).stat().st_size
    return size / merged.tokens


def train_on(store: RowStore, target: Decoder, params: Params, merged: MergedManifest) -> HeldOut:
    """A short training on `store`; held-out figures on the states of the default form."""
    told, (d2t, _) = params.train, read_vocabulary(merged)
    names = ("heads", "kv_heads", "head_dim", "intermediate_size", "seed", "head", "loss", "products")
    sizes = {name: getattr(told, name) for name in names}
    draft, teacher = start_draft(target, d2t + torch.arange(len(d2t)), **sizes)
    schedule = schedule_of(params.model_copy(update={"train": told.model_copy(update={"optimizer_steps": STEPS})}))
    rows, plain = read_rows(store, target.device), read_rows(RowStore(HIDDEN_STATES), target.device)
    trainer = Trainer(draft, teacher, schedule)
    order = BatchOrder([row.length for row in rows.train], told.batch_tokens, told.seed)
    for step in range(STEPS):
        trainer.train(rows.pack([rows.train[i] for i in order(step)]))
    return evaluate(trainer.averaged(), teacher, plain, params)


def main() -> None:
    params, merged = load_params(), MergedManifest.read(MERGED_MANIFEST)
    if merged.capture.form != StoredForm():
        sys.exit(
            "the merged set is not in the default form: set capture.store_* to their defaults and run `dvc repro merge`"
        )
    torch.set_num_threads(params.target.threads)
    target = load_target(locate_target(params.target.origin), params.target.device)
    found: dict[str, HeldOut] = {}
    for name, form in FORMS.items():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=".cache") as folder:
            size = write_form(merged, form, Path(folder))
            found[name] = train_on(RowStore(Path(folder)), target, params, merged)
        here, plain = found[name].overall, found["default"].overall
        print(
            f"{name}: {size:.0f} bytes a token; accept length {here.accept_length:.4f} ({here.low:.3f} to {here.high:.3f}), "
            f"{here.accept_length - plain.accept_length:+.4f}; held-out loss {found[name].loss:.4f}; "
            f"{STEPS} steps, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    other = [name for name in LOSSLESS if found[name] != found["default"]]
    if other:
        sys.exit(f"these forms leave out something that training looks at: {', '.join(other)}")


if __name__ == "__main__":
    main()
