"""What a glance tells, for a terminal of 80 columns: dense lines, tables, notes by gravity, the next command.

Every value goes in as rich Text, since a name or a path may hold square brackets, which a plain string would take for markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from stages.glancing.told import LEVELS, Facts, Note, Told

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_COLOUR = {"fault": "bold red", "risk": "yellow", "note": "dim", "fine": "green"}
_MOST_LINES = 12  # of a table; lines that say something odd come first
_STEPS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_NUMBERS = {"rows", "tokens", "files", "bytes", "size", "shape", "points", "holes"}


def show(told: Told, console: Console) -> None:
    """Print `told`."""
    from rich.text import Text

    console.print(Text.assemble((told.path, "bold"), "  ", (told.what, "cyan")))
    lines = [(label, value) for label, value in _LINES.get(told.kind, _plain)(told.facts) if value]
    tables = [(k, v) for k, v in told.facts.items() if _is_table(v)]
    if lines:
        console.print(_grid(lines))
    for name, rows in tables:
        console.print()
        console.print(table_of(name, cast("list[Facts]", rows)))
    if told.notes:
        console.print()
        console.print(notes_of(told.notes))
    for i, step in enumerate(told.next):
        console.print(Text.assemble(("next  " if not i else "      ", "dim"), (step, "bold")), soft_wrap=True)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _grid(lines: Sequence[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in lines:
        grid.add_row(Text(label), Text(value))
    return grid


def notes_of(notes: Sequence[Note]) -> Table:
    """Notes by gravity: its word, what, where it is, and behind an arrow what to do."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for note in sorted(notes, key=lambda n: LEVELS.index(n.level)):
        words = Text(note.words, style="dim" if note.level in ("note", "fine") else "")
        if note.where:
            words.append(f" [{note.where}]", style="dim")
        if note.do:
            words.append(f"\n→ {note.do}", style="italic")
        grid.add_row(Text(note.level, style=_COLOUR[note.level]), words)
    return grid


def table_of(name: str, rows: Sequence[Facts]) -> RenderableType:
    """A table of objects with equal names; long ones are cut, odd lines first."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    names = [n for n in rows[0] if any(r.get(n) not in (None, "", []) for r in rows) and n != "holes"]
    odd = [r for r in rows if r.get("state", "whole") != "whole" or r.get("config") is False]
    shown = list(rows) if len(rows) <= _MOST_LINES else (odd[:_MOST_LINES] or list(rows[: _MOST_LINES // 2]))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for n in names:
        right = all(isinstance(r.get(n), int | float | None) and not isinstance(r.get(n), bool) for r in rows)
        table.add_column(n.replace("_", " "), justify="right" if right else "left", overflow="fold")
    for row in shown:
        table.add_row(*(Text(say(n, row.get(n))) for n in names))
    rest = len(rows) - len(shown)
    return (
        Group(
            table,
            Text(f"… and {rest} more, {'all whole' if len(odd) <= len(shown) else 'some not whole'}", style="dim"),
        )
        if rest
        else table
    )


def say(name: str, value: Any) -> str:
    """A fact's value for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return size(value) if name.endswith("bytes") else f"{value:,}".replace(",", "\u202f")
    if isinstance(value, dict):
        return ", ".join(f"{k} {say(str(k), v)}" for k, v in cast("Facts", value).items())
    if isinstance(value, list):
        return listed(cast("list[Any]", value))
    return str(value)


def listed(values: Sequence[Any]) -> str:
    """`2, 30, 58`; spans as `0–1999`."""
    if values and all(isinstance(v, list) and len(v) == 2 for v in values):
        return ", ".join(f"{a}–{b - 1}" for a, b in values[:6]) + (
            f" … ({len(values) - 6} more)" if len(values) > 6 else ""
        )
    return ", ".join(map(str, values[:12])) + (f" … ({len(values) - 12} more)" if len(values) > 12 else "")


def size(count: int) -> str:
    """`1.41 TB`, `640 B`."""
    for unit, step in _STEPS:
        if count >= step:
            return f"{count / step:.3g} {unit}B"
    return f"{count} B"


def _dots(*parts: str) -> str:
    return " · ".join(p for p in parts if p)


def _states(f: Facts) -> list[tuple[str, str]]:
    rows = f"{say('rows', f['rows'])} rows" + (
        f", {say('', f['rows_missing'])} missing" if f.get("rows_missing") else ""
    )
    tokens = (
        f"{say('', f['tokens'])} tokens" + (f" ({f['tokens_are']})" if f.get("tokens_are") else "")
        if f.get("tokens") is not None
        else ""
    )
    folders = f"{f['folders']} folders" if f.get("folders") else ""
    ids = f"ids {listed(f['layer_ids'])} as {f['written_in']} writes them" if f.get("layer_ids") else "no ids written"
    return [
        ("rows", _dots(rows, f"{say('', f['shards'])} shards" if "shards" in f else folders, tokens, size(f["bytes"]))),
        ("ranges", listed(f.get("ranges") or [])),
        ("layers", _dots(ids, _meaning(f))),
        ("", _others(f)),
        (
            "last state",
            {"before_final_norm": "before the final norm", "after_final_norm": "after the final norm"}.get(
                f["last_state"], "before or after the final norm: not recorded"
            ),
        ),
        (
            "stored",
            _dots(
                f["layout"],
                f["dtype"] or "",
                f"{f['states_in_a_row']} states a row" if f.get("states_in_a_row") else "",
                f"H {f['hidden_size']}" if f.get("hidden_size") else "",
            ),
        ),
        ("target", f.get("target") or ""),
        ("source", f.get("source") or ""),
    ]


def _meaning(f: Facts) -> str:
    of = f" of {f['layers']} ({f['layers_known_from']})" if f.get("layers") else ""
    if f.get("points"):
        last = f"; last after {f['last_point']}" if f.get("last_point") is not None else ""
        return f"points after layer {listed(f['points'])}{last}{of}"
    if f.get("points_if_default"):
        return f"its default would be after layer {listed(f['points_if_default'])}{of}"
    return ""


def _others(f: Facts) -> str:
    others = f.get("other_readings") or []
    return (
        "written by another tool: " + "; ".join(f"{o['if_written_by']} {listed(o['points'])}" for o in others)
        if others
        else ""
    )


def _plain(f: Facts) -> list[tuple[str, str]]:
    return [
        (name.replace("_", " "), say(name, value))
        for name, value in f.items()
        if not _is_table(value) and value not in (None, [], {})
    ]


_LINES = {"hidden_states": _states}
