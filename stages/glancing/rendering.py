"""What a glance tells, for a terminal of 80 columns: dense lines, tables, notes by gravity, the next command.

Every value goes in as rich Text, since a name or a path may hold square brackets, which a plain string would take for markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.glancing.lines import is_table, lines_of, plain, say
from stages.glancing.told import LEVELS, Facts, Note, Told

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_COLOUR = {"fault": "bold red", "risk": "yellow", "note": "dim", "fine": "green"}
_MOST_LINES = 12  # of a table; lines that say something odd come first
_HIDDEN_COLUMNS = {"holes", "points"}
_HIDDEN = {"overlaps", "other_readings"}  # tables whose content the lines or notes already say


def console() -> Console:
    """A console that colours nothing by itself."""
    from rich.console import Console

    return Console(highlight=False)


def show_stages(records: Sequence[Facts], unreadable: Sequence[str], page: Path, step: str | None, on: Console) -> None:
    """The line of a repository, what of it cannot be read, where its page is, and the next command, if one is needed."""
    from rich.text import Text

    on.print(stages_of(records))
    for fault in unreadable:
        on.print(Text.assemble(("unreadable", "red"), plain(f" {fault}")))
    on.print(f"report: {page}" if page.exists() else "report: none yet", style="dim")
    if step:
        on.print(Text.assemble(("next  ", "dim"), (step, "bold")), soft_wrap=True)


def show(told: Told, console: Console) -> None:
    """Print `told`."""
    from rich.text import Text

    console.print(Text.assemble((plain(told.path), "bold"), "  ", (plain(told.what), "cyan")))
    lines = lines_of(told.kind, told.facts)
    tables: list[tuple[str, list[Facts]]] = [(k, v) for k, v in told.facts.items() if is_table(v) and k not in _HIDDEN]
    if lines:
        console.print(_grid(lines))
    for name, rows in tables:
        console.print()
        console.print(stages_of(rows) if name == "stages" else table_of(rows))
    if told.notes:
        console.print()
        console.print(notes_of(told.notes))
    for i, step in enumerate(told.next):
        console.print(Text.assemble(("next  " if not i else "      ", "dim"), (plain(step), "bold")), soft_wrap=True)


def _grid(lines: Sequence[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in lines:
        grid.add_row(Text(label), Text(plain(value)))
    return grid


def notes_of(notes: Sequence[Note]) -> Table:
    """Notes by gravity: its word, what, where it is, and behind an arrow what to do."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for note in sorted(notes, key=lambda n: LEVELS.index(n.level)):
        words = Text(plain(note.words), style="dim" if note.level in ("note", "fine") else "")
        if note.where:
            words.append(plain(f" [{note.where}]"), style="dim")
        if note.do:
            words.append(plain(f"\n→ {note.do}"), style="italic")
        grid.add_row(Text(note.level, style=_COLOUR[note.level]), words)
    return grid


def table_of(rows: Sequence[Facts]) -> RenderableType:
    """A table of objects with equal names; long ones are cut, odd lines first."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    names = [n for n in rows[0] if any(r.get(n) not in (None, "", []) for r in rows) and n not in _HIDDEN_COLUMNS]
    odd = [r for r in rows if r.get("state", "whole") != "whole" or r.get("config") is False]
    shown = list(rows) if len(rows) <= _MOST_LINES else (odd[:_MOST_LINES] or list(rows[: _MOST_LINES // 2]))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for n in names:
        right = all(isinstance(r.get(n), int | float | None) and not isinstance(r.get(n), bool) for r in rows)
        table.add_column(n.replace("_", " "), justify="right" if right else "left", overflow="fold")
    for row in shown:
        table.add_row(*(Text(plain(say(n, row.get(n)))) for n in names))
    rest = len(rows) - len(shown)
    return (
        Group(
            table,
            Text(f"… and {rest} more, {'all whole' if len(odd) <= len(shown) else 'some not whole'}", style="dim"),
        )
        if rest
        else table
    )


_STATES = {"passed": "green", "done": "green", "refused": "red", "stale": "yellow", "missing": "dim"}


def stages_of(records: Sequence[Facts]) -> Table:
    """The line: stage, state, figures."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("stage", "state", "figures"):
        table.add_column(name, overflow="fold")
    for record in records:
        figures = ", ".join(
            f"{k.replace('_', ' ')} {say(k, v)}" for k, v in record.items() if k not in ("stage", "state")
        )
        state = str(record["state"])
        table.add_row(Text(str(record["stage"])), Text(state, style=_STATES[state]), Text(plain(figures)))
    return table
