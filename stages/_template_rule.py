"""How a foreign store's loss masks follow from its tokens: by the chat template of its target, where that is at hand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.contracts.errors import DataError, EngineError, ParamsError
from stages.contracts.params import load_params
from stages.targets import locate_target

if TYPE_CHECKING:
    from stages.bridges.kinds import StoreFile
    from stages.bridges.stores import ForeignStore
    from stages.capture.findings import RowLike
    from stages.capture.masks import MaskRule

_MASK_ROWS = (
    64  # rows, more than a batch of permuted ones, that tell which rule of the template the stored masks follow
)


def target_at_hand(named: object, hidden_size: object) -> Path | None:
    """The folder of the target that a run names, if it is here; else that of params.yaml's, if it is as wide."""
    if isinstance(named, str):
        folder = Path(os.path.expanduser(named))
        if (folder / "config.json").is_file():
            return folder
    try:
        target = load_params().target
        if target.hidden_size == hidden_size:
            return locate_target(target.origin)
    except (ParamsError, EngineError):
        pass
    return None


def rule_of(folder: Path, store: ForeignStore, chosen: Sequence[StoreFile]) -> MaskRule:
    """The rule of the template in `folder` that the masks of the chosen files follow.

    Raises:
        DataError: no template, or one that does not show where an answer begins and ends.
    """
    from stages.capture.masks import choose_rule, template_rules

    def readable() -> Iterator[RowLike]:
        for file in chosen[:_MASK_ROWS]:
            try:
                yield store.row(file)
            except DataError:
                continue

    return choose_rule(readable(), template_rules(folder))
