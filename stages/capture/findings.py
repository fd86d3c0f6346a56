"""What a look at stored values finds, and the rows it looks at: any tool's, ours too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

LastState = Literal["before_final_norm", "after_final_norm", "unknown"]


class RowLike(Protocol):
    """One stored row: input_ids [L]; loss_mask [L] or None; aux: a state [L, H] a slot, ascending points, dtype as stored;
    last: [L, H] or None. A row that lies about its lengths is a finding, not an error."""

    @property
    def index(self) -> int | str: ...
    @property
    def file(self) -> str: ...
    @property
    def input_ids(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor | None: ...
    @property
    def aux(self) -> tuple[Tensor, ...]: ...
    @property
    def last(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be (or, as a note, one that was found out), in words for a person.

    Attributes:
        kind: one word for programs, equal for equal faults.
        file, index: the row it was found in; "" and None when it is said of many.
        what, expected, found, do: as an error says it.
        note: nothing is wrong; a fact that nothing had recorded.
        detail: the same as plain values, for programs.
    """

    kind: str
    file: str
    index: int | str | None
    what: str
    expected: str
    found: str
    do: str
    note: bool = False
    detail: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def words(self) -> str:
        """All of it in lines, the file first."""
        head = f"{self.file}: {self.what}" if self.file else self.what
        parts = (("expected", self.expected), ("found", self.found), ("what to do", self.do))
        return "\n".join([head, *(f"  {name}: {value}" for name, value in parts if value)])


@dataclass(frozen=True, eq=False)
class RowHead:
    """The first tokens of a row, which no longer keeps the rest in memory."""

    index: int | str
    file: str
    input_ids: Tensor
    loss_mask: Tensor | None
    aux: tuple[Tensor, ...]
    last: Tensor | None


def head_of(row: RowLike, tokens: int) -> RowLike:
    """The row itself when it is no longer than `tokens`."""
    if len(row.input_ids) <= tokens:
        return row

    def cut(part: Tensor) -> Tensor:
        return part[:tokens].clone()

    mask = None if row.loss_mask is None else cut(row.loss_mask)
    last = None if row.last is None else cut(row.last)
    return RowHead(row.index, row.file, cut(row.input_ids), mask, tuple(map(cut, row.aux)), last)


def slots_of(row: RowLike) -> tuple[Tensor, ...]:
    """A row's states, a tensor [L, H] a slot, the last state behind the auxiliary ones."""
    return row.aux if row.last is None else (*row.aux, row.last)


def dtype_name(tensor: Tensor) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def few(items: list[int], most: int = 5) -> str:
    """The first of `items`, and how many there are when not all are shown."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown}, … ({len(items)} in all)"
