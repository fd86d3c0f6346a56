"""What a glance tells: facts for programs, notes that judge them, and the next command. Rendering is apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["fault", "risk", "note", "fine"]
LEVELS: tuple[Level, ...] = ("fault", "risk", "note", "fine")  # the order in which they are shown
Facts = dict[str, Any]


@dataclass(frozen=True)
class Note:
    """level: fault (wrong or missing for certain), risk (cannot be ruled out from here), note (worth knowing), fine (a
    known fault that this data cannot have). where: the file or folder, if one."""

    level: Level
    words: str
    do: str = ""
    where: str = ""


@dataclass
class Told:
    """kind: hidden_states, draft, target, prepared, merged, line, data_root, work_cache or folder; what: it in one line.

    A fact that is a list of objects is a table; names of facts carry their units (`bytes`, `tokens`).
    """

    path: str
    kind: str
    what: str
    facts: Facts = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    next: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[Note]:
        return [n for n in self.notes if n.level == "fault"]

    def add(self, level: Level, words: str, do: str = "", where: str = "") -> None:
        """Add one note; the same note twice is one."""
        note = Note(level, words, do, where)
        if note not in self.notes:
            self.notes.append(note)

    def as_json(self) -> Facts:
        """For programs: notes by gravity, everything else as it stands."""
        notes = sorted(self.notes, key=lambda n: LEVELS.index(n.level))
        return asdict(self) | {"notes": [asdict(n) for n in notes]}


def many(count: int, noun: str) -> str:
    """`1 file`, `2 000 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}".replace(",", "\u202f")


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
