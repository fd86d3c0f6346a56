"""Where training starts: from the target, or from a draft that was trained before, checked to be one of this target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages._train_rows import Rows
from stages.contracts.draft import DRAFT_RECORD, DraftRecord, DraftStart
from stages.contracts.errors import EngineError, Refusal
from stages.contracts.files import file_digest
from stages.contracts.manifest import MergedManifest
from stages.contracts.params import Params
from stages.contracts.release import RELEASES, current
from stages.drafts.eagle3 import DraftCheckpoint, Eagle3, Teacher, carry_over, read_draft

CURRENT = "current_release"
_SAME_ROWS = 0.01  # relative distance of two heads that rounding to bfloat16 explains
_OR_SCRATCH = "name another draft in train.start_from, or null to start from the target"


@dataclass(frozen=True)
class Start:
    """A draft to go on from; its folder, record and files as they were read."""

    folder: Path
    record: DraftRecord
    checkpoint: DraftCheckpoint


def find_start(params: Params, merged: MergedManifest) -> Start | None:
    """The draft that train.start_from names; none for a start from the target, which a line without a release yet makes.

    Raises:
        Refusal: it is of another target or other points, has other sizes, or its files are not those of its record.
        DataError, EngineError: it cannot be read.
    """
    name = told = params.train.start_from
    if name is None:
        return None
    if name == CURRENT:
        if (release := current()) is None:
            return None
        name = str(RELEASES / release / "draft")
    folder = Path(name)
    if not (folder / DRAFT_RECORD).exists():
        raise Refusal(
            "There is no draft that training could go on from",
            where=f"params.yaml: train.start_from ({told})",
            expected=f"a draft's folder, with its {DRAFT_RECORD}",
            got="no such folder" if not folder.exists() else f"no {DRAFT_RECORD} in it",
            do="name a draft's folder, or null"
            if told == name
            else f"`python -m flows.release fetch {folder.parent.name} {folder.parent}`, or name null",
        )
    record = DraftRecord.read(folder / DRAFT_RECORD)
    files = (("weights", "model.safetensors", record.weights_digest), ("config", "config.json", record.config_digest))
    faults = [
        (f"its {what} are of {good}", f"{folder / file} has {got}")
        for what, file, good in files
        if (got := file_digest(folder / file)) != good
    ]
    start = Start(folder, record, read_draft(folder))
    faults += [(f"{what} {good}", f"{got}") for what, good, got in _pairs(start, params, merged) if good != got]
    if faults:
        raise Refusal(
            "Training cannot go on from this draft",
            where=str(folder),
            expected="; ".join(good for good, _ in faults),
            got="; ".join(got for _, got in faults),
            do=_OR_SCRATCH,
        )
    return start


def _pairs(start: Start, params: Params, merged: MergedManifest) -> list[tuple[str, Any, Any]]:
    """What has to be equal: words, the value here, the draft's."""
    own, target, config, told = start.record, merged.target, start.checkpoint.config, params.train
    sizes = ("heads", "kv_heads", "head_dim", "intermediate_size")
    pairs: list[tuple[str, Any, Any]] = [
        ("target weights", target.weights_digest, own.target.weights_digest),
        ("tokenizer", target.tokenizer_digest, own.target.tokenizer_digest),
        ("capture points", list(merged.capture.points), list(own.points)),
        ("last state", merged.capture.last_state, own.capture.last_state),
        ("hidden size", target.hidden_size, config.hidden_size),
        ("vocabulary", target.vocab_size, config.vocab_size),
        *((f"train.{name}", getattr(told, name), getattr(config, name)) for name in sizes),
        ("train.norms", list(told.norms), list(config.norms)),
        ("norms in its record", list(config.norms), list(own.norms)),
    ]
    if told.start_vocabulary == "keep":
        pairs.append(("merge.draft_vocab_size", params.merge.draft_vocab_size, config.draft_vocab_size))
    return pairs


def vocabulary_of(start: Start | None, merged: tuple[Tensor, Tensor], params: Params) -> tuple[Tensor, Tensor]:
    """d2t and t2d to train with: the merged ones, or those of the draft that is gone on from."""
    if start is None or params.train.start_vocabulary == "rebuild":
        return merged
    return start.checkpoint.d2t, start.checkpoint.t2d


def go_on_from(
    start: Start, draft: Eagle3, teacher: Teacher, rows: Rows, merged_ids: Tensor, params: Params
) -> DraftStart:
    """Fill the fresh `draft` with the earlier one's weights, and say what was carried over.

    Raises:
        EngineError: train.head is frozen and the earlier draft's head is not the target's own.
        Refusal: it turns positions or norms states by other figures than a draft of this target does.
    """
    earlier, told = start.checkpoint, params.train
    figures = [(n, getattr(draft.config, n), getattr(earlier.config, n)) for n in ("rope_theta", "eps")]
    if faults := [figure for figure in figures if figure[1] != figure[2]]:
        raise Refusal(
            "Training cannot go on from this draft",
            where=str(start.folder / "config.json"),
            expected="; ".join(f"{name} {here}" for name, here, _ in faults),
            got="; ".join(f"{name} {its}" for name, _, its in faults),
            do=_OR_SCRATCH,
        )
    if told.head == "frozen":
        _demand_targets_head(start, teacher)
    own_ids = teacher.target_ids
    known = carry_over(draft, earlier.tensors, earlier.target_ids(), own_ids)
    return DraftStart(
        draft_digest=start.record.digest(),
        weights_digest=start.record.weights_digest,
        vocabulary=told.start_vocabulary,
        ids_kept=known,
        ids_new=len(own_ids) - known,
        ids_of_merged=int(torch.isin(merged_ids, own_ids.cpu()).sum()),
        coverage_train=coverage(rows, teacher),
    )


def coverage(rows: Rows, teacher: Teacher) -> float:
    """Share of the training rows' supervised tokens whose id the draft can say."""
    inside = supervised = 0
    for row in rows.train:
        _, ids, mask = rows.store.row(row.folder, row.row_in_folder)
        spoken = ids.long()[mask.bool()]
        inside += int((teacher.draft_id.cpu()[spoken] >= 0).sum())
        supervised += len(spoken)
    return inside / max(1, supervised)


def _demand_targets_head(start: Start, teacher: Teacher) -> None:
    ids = start.checkpoint.target_ids().to(teacher.draft_id.device)
    at = teacher.draft_id[ids]
    theirs = start.checkpoint.tensors["lm_head.weight"].to(teacher.head)[at >= 0]
    apart = float((theirs - teacher.head[at[at >= 0]]).norm() / teacher.head.norm())
    if apart > _SAME_ROWS:
        raise EngineError(
            "This draft's head was trained, and train.head: frozen would put the target's own in its place",
            where=f"{start.folder}: lm_head.weight",
            expected=f"the target's rows, to {_SAME_ROWS:g} of their norm",
            got=f"{apart:.3f} apart",
            do="set train.head: trained, or " + _OR_SCRATCH,
        )
