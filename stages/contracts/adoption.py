"""What crossed the border between this line and another tool's store: adopted from one, handed over to one, or mended in one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from stages.contracts.files import Fact
from stages.contracts.manifest import HIDDEN_STATES

ADOPTION = HIDDEN_STATES / "adopted.json"
HANDED_OVER = "handed_over.json"
MENDED_MASKS = "mended_masks.json"


class AdoptionRecord(Fact):
    """data/hidden_states/adopted.json, only there when states were adopted.

    layer_ids: as written, in the dialect `numbering`, by the store's configs or by params.yaml; points: what they mean;
    rows: prepared rows whose states come from the store; extracted_rows: those that it lacks and the target made;
    unused_rows: of the store, that are no prepared row; doubled_rows: of the store, whose tokens stand in an earlier file;
    cut_rows: prepared rows that the store has without their last token; differing_masks and absent_masks: adopted rows
    whose stored mask is another than the prepared one, which was taken, or is not there; padded_rows: whose padding was
    left out; dtypes: rows by the dtype of their states, which are stored here in bfloat16; faulty: files that were left
    aside, with the reason; strange_files: files that are no samples.
    """

    version: Literal[1] = 1
    tool: str
    era: str
    tool_versions: tuple[str, ...]
    store_fingerprint: str
    numbering: str
    layer_ids: tuple[int, ...]
    layer_ids_from: Literal["store", "params"]
    points: tuple[int, ...]
    last_state_from: Literal["store", "params"]
    files: int
    rows: int
    extracted_rows: int
    unused_rows: int
    doubled_rows: int
    cut_rows: int
    padded_rows: int
    differing_masks: int
    absent_masks: int
    dtypes: dict[str, int]
    faulty: dict[str, str]
    strange_files: int


class HandOver(Fact):
    """handed_over.json at the root of a store written for another tool. held_out_rows: rows that were not trained on
    here; layer_ids: the points in `numbering`, with the last one where that tool writes it; last_state: where it stands."""

    version: Literal[1] = 1
    format: str
    merged_digest: str
    target: str
    points: tuple[int, ...]
    numbering: str
    layer_ids: tuple[int, ...]
    last_state: Literal["before_final_norm", "after_final_norm"]
    train_rows: int
    held_out_rows: int
    tokens: int
    draft_vocab_size: int
    how_to_train: str

    @classmethod
    def path(cls, root: Path) -> Path:
        return root / HANDED_OVER


class MendedFolder(BaseModel):
    """One folder whose masks stood beside other rows' tokens. batch: rows in a batch, 0 when the folder is smaller than one;
    rows: numbers of the files that hold another mask now."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int
    rows: tuple[int, ...]


class MendedMasks(Fact):
    """mended_masks.json at the root of a copy of another tool's store in which every row has its own loss mask again.

    store_fingerprint: of the original; folders: by name, "." for the root; rebuilt_rows: whose mask was made from their tokens,
    since it was nowhere whole; unread: files that could not be read, which stand in the copy as they were, with the reason.
    """

    version: Literal[1] = 1
    store_fingerprint: str
    rows: int
    mended_rows: int
    rebuilt_rows: int
    folders: dict[str, MendedFolder]
    unread: dict[str, str]

    @classmethod
    def path(cls, root: Path) -> Path:
        return root / MENDED_MASKS
