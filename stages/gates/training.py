"""gate-training: stored states and the draft vocabulary, before a training run is spent on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.contracts.manifest import MERGED, renewal
from stages.contracts.params import Params
from stages.gates._judge import Table, same
from stages.gates._training_evidence import Evidence
from stages.gates._training_folders import folders
from stages.gates._training_last import last
from stages.gates._training_rows import rows
from stages.gates._training_slots import slots
from stages.gates._training_vocabulary import always, coverage, sizes, vocabulary

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Evidence", "tables"]


def tables(evidence: Evidence, params: Params) -> list[Table]:
    """Tables identity, folders, rows, slots, last state, vocabulary, special tokens, coverage."""
    return [
        _chain(evidence.chain),
        folders(evidence, params),
        rows(evidence),
        slots(evidence, params),
        last(evidence, params),
        vocabulary(evidence, params),
        sizes(evidence, params),
        always(evidence),
        coverage(evidence),
    ]


def _chain(chain: DataFrame) -> Table:
    check = same(
        "found",
        "expected",
        says="rows, states and vocabulary belong together and to this target",
        why="states of other weights or of rows since changed pair a token with another token's state",
        do="run `dvc repro merge`; it brings prepare, extract and merge into step. For a file of data/merged: "
        + renewal(MERGED / "FILE", "merge"),
    )
    return Table("identity", chain, "item", (check,))
