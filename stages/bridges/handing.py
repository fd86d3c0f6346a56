"""Handing over: merged rows and states, written in the form that another tool's trainer reads.

A format that can be written has, beside what kinds.Format asks for, NUMBERING (the dialect its trainer is told layers in),
LAST_STATE, and `write(root, parcel) -> str`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from stages.contracts.adoption import HANDED_OVER
from stages.contracts.errors import LineError, Refusal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class OutRow:
    """input_ids, loss_mask i64 [L]; states bf16 [L, S, H]: the points ascending, then the last before the final norm."""

    split: Literal["train", "held_out"]
    input_ids: Tensor
    loss_mask: Tensor
    states: Tensor


@dataclass(frozen=True)
class Parcel:
    """All that a trainer needs: rows (training rows first, each asked for once); layer_ids of the auxiliary states in its
    own words; d2t i64 [D], offsets; t2d bool [V]; norm: the target's final norm, of bf16 [L, H]."""

    rows: Iterable[OutRow]
    layer_ids: tuple[int, ...]
    d2t: Tensor
    t2d: Tensor
    norm: Callable[[Tensor], Tensor]


class WritableFormat(Protocol):
    NUMBERING: str
    LAST_STATE: Literal["before_final_norm", "after_final_norm"]

    def write(self, root: Path, parcel: Parcel) -> str:
        """Write everything below `root`, an empty folder; return how its trainer is to be started on it."""
        ...


def writable_formats() -> dict[str, WritableFormat]:
    """Formats that can be written, by name."""
    from stages.bridges.kinds import all_formats

    return {n: cast("WritableFormat", m) for n, m in all_formats().items() if hasattr(m, "write")}


def choose(arguments: list[str]) -> tuple[str, Path]:
    """The two selectors on the command line.

    Raises:
        LineError: not two, or no format that can be written.
    """
    names = sorted(writable_formats())
    if len(arguments) != 2 or arguments[0] not in names:
        raise LineError(
            "Hand over to which tool, and where?",
            where="command line",
            expected=f"{' | '.join(names)}, then a folder",
            got=" ".join(arguments) or "nothing",
        )
    return arguments[0], Path(arguments[1])


def demand_own_place(root: Path) -> None:
    """Raises Refusal when something else than an earlier hand-over stands at `root`: it would be replaced."""
    if root.exists() and not (root.is_dir() and ((root / HANDED_OVER).exists() or not any(root.iterdir()))):
        raise Refusal(
            "Something else stands where the store is to go",
            where=str(root),
            expected=f"no folder, an empty one, or one with {HANDED_OVER}, which is replaced as a whole",
            got="files of another origin",
            do="name another folder",
        )
