"""What every trainer of the comparison is given, written once: rows, target head, embedding, vocabulary, draft sizes.

A trainer runs in a process of its own that reads this folder and nothing else of the line, so that its peak of memory is
its own. Needs a merged set (`dvc repro gate-training`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages._train_rows import read_rows, read_vocabulary
from stages.capture.store import RowStore
from stages.contracts.files import canonical, digest, whole_folder
from stages.contracts.manifest import HIDDEN_STATES, MERGED_MANIFEST, MergedManifest
from stages.contracts.params import load_params
from stages.drafts.eagle3 import Eagle3Config, PackedBatch, start_draft
from stages.targets import load_target, locate_target

CACHE = Path(".cache/benchmarks/training")
PROMPTS = 224  # training rows, drawn by a seed of their own
"""Of the training split."""


def prepare() -> Path:
    """The folder of inputs; made when it is not there yet."""
    params, merged = load_params(), MergedManifest.read(MERGED_MANIFEST)
    told = params.train
    sizes = {name: getattr(told, name) for name in ("heads", "kv_heads", "head_dim", "intermediate_size")}
    key = digest(canonical({"merged": merged.digest(), "prompts": PROMPTS, "sizes": sizes}))
    folder = CACHE / key.removeprefix("sha256:")[:16]
    if folder.exists():
        return folder
    target = load_target(locate_target(params.target.origin), params.target.device, stored=True)
    d2t, t2d = read_vocabulary(merged)
    draft, teacher = start_draft(target, d2t + torch.arange(len(d2t)), seed=told.seed, **sizes)
    rows = read_rows(RowStore(HIDDEN_STATES), target.device)
    drawn = torch.randperm(len(rows.train), generator=torch.Generator().manual_seed(0))[:PROMPTS].tolist()
    batch = rows.pack([rows.train[i] for i in drawn])
    CACHE.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as made:
        start = {f"start.{n}": p.detach().contiguous() for n, p in draft.named_parameters()}
        head = {"embedding": draft.embedding, "head": target.head_weight.float(), "norm": teacher.norm}
        vocabulary = {"d2t": d2t, "t2d": t2d}
        tokens = {"ids": batch.input_ids, "mask": batch.loss_mask, "lengths": torch.tensor(batch.lengths)}
        states = {"aux": batch.aux.bfloat16(), "last": batch.last.bfloat16()}
        everything = start | head | vocabulary | tokens | states
        save_file({n: t.clone().contiguous() for n, t in everything.items()}, made / "inputs.safetensors")
        (made / "config.json").write_bytes(canonical(dataclasses.asdict(draft.config)))
    return folder


class Inputs:
    """The folder as a trainer's process reads it: what it asks for and no more."""

    def __init__(self, folder: Path) -> None:
        self._file = safe_open(folder / "inputs.safetensors", framework="pt")
        told = json.loads((folder / "config.json").read_bytes())
        self.config = Eagle3Config(**{**told, "eos_ids": tuple(told["eos_ids"])})
        self.lengths: list[int] = self.tensor("lengths").tolist()
        self._starts = [0]
        for length in self.lengths:
            self._starts.append(self._starts[-1] + length)

    def tensor(self, name: str) -> Tensor:
        """A copy of a stored tensor."""
        return self._file.get_tensor(name).clone()

    def start(self) -> dict[str, Tensor]:
        """Our own starting weights."""
        names = [n for n in list(self._file.keys()) if n.startswith("start.")]
        return {n.removeprefix("start."): self.tensor(n) for n in names}

    def pack(self, rows: list[int]) -> PackedBatch:
        """These rows, end to end, in float32."""

        def gather(name: str) -> Tensor:
            stored = self._file.get_slice(name)
            return torch.cat([stored[self._starts[r] : self._starts[r + 1]] for r in rows])

        return PackedBatch(
            row_ids=tuple(f"row {r}" for r in rows),
            lengths=tuple(self.lengths[r] for r in rows),
            input_ids=gather("ids"),
            loss_mask=gather("mask"),
            aux=gather("aux").float(),
            last=gather("last").float(),
        )


def as_one_row(batch: PackedBatch, length: int) -> PackedBatch:
    """The batch's first `length` tokens as a single row."""
    assert len(batch.input_ids) >= length
    fields = {name: getattr(batch, name)[:length].clone() for name in ("input_ids", "loss_mask", "aux", "last")}
    return PackedBatch(row_ids=("long row",), lengths=(length,), **fields)
