"""What training reads: the merged rows with their states, and the vocabulary; checked to belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor

from stages.capture.store import RowStore
from stages.capture.verify import REPAIR, apart, captured_folder
from stages.contracts.errors import DataError, ParamsError, Refusal
from stages.contracts.files import file_digest
from stages.contracts.manifest import HIDDEN_STATES, MERGED, MERGED_MANIFEST, MergedManifest, TargetIdentity, renewal
from stages.contracts.params import Params
from stages.drafts.eagle3 import PackedBatch, check_vocabulary


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
        """These rows end to end; the stored states are read once and written once, in float32."""
        parts = [self.store.row(row.folder, row.row_in_folder) for row in rows]
        (_, slots, H), T = parts[0][0].shape, sum(len(ids) for _, ids, _ in parts)
        aux, last = (torch.empty(T, n, H, device=self.device) for n in (slots - 1, 1))
        at = 0
        for states, _, _ in parts:
            part, states = slice(at, at + len(states)), states.to(self.device)
            aux[part], last[part], at = states[:, :-1], states[:, -1:], part.stop
        return PackedBatch(
            row_ids=tuple(row.row_id for row in rows),
            lengths=tuple(row.length for row in rows),
            input_ids=torch.cat([ids for _, ids, _ in parts]).to(self.device).long(),
            loss_mask=torch.cat([mask for _, _, mask in parts]).to(self.device).bool(),
            aux=aux.flatten(1),
            last=last[:, 0],
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
