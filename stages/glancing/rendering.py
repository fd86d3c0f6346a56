"""What a glance tells, for a terminal of 80 columns: dense lines, tables, notes by gravity, the next command.

Every value goes in as rich Text, since a name or a path may hold square brackets, which a plain string would take for markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stages.glancing.told import LEVELS, Facts, Note, Told, many

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_COLOUR = {"fault": "bold red", "risk": "yellow", "note": "dim", "fine": "green"}
_MOST_LINES = 12  # of a table; lines that say something odd come first
_STEPS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_IN_WORDS = {"tool", "points", "layers", "last_state", "dtype", "hidden_size"}  # what points_in_words says
_DIGEST = 19  # characters of one that are shown; programs get it whole
_HIDDEN_COLUMNS = {"holes", "points"}
_HIDDEN = {"overlaps", "other_readings"}  # tables whose content the lines or notes already say


def console() -> Console:
    """A console that colours nothing by itself."""
    from rich.console import Console

    return Console(highlight=False)


def show_stages(records: Sequence[Facts], unreadable: Sequence[str], page: Path, on: Console) -> None:
    """The line of a repository, what of it cannot be read, and where its page is."""
    from rich.text import Text

    on.print(stages_of(records))
    for fault in unreadable:
        on.print(Text.assemble(("unreadable", "red"), f" {fault}"))
    on.print(f"report: {page}" if page.exists() else "report: none yet, run `dvc repro`", style="dim")


def show(told: Told, console: Console) -> None:
    """Print `told`."""
    from rich.text import Text

    console.print(Text.assemble((told.path, "bold"), "  ", (told.what, "cyan")))
    lines = [(label, value) for label, value in _LINES.get(told.kind, _plain)(told.facts) if value]
    tables: list[tuple[str, list[Facts]]] = [(k, v) for k, v in told.facts.items() if _is_table(v) and k not in _HIDDEN]
    if lines:
        console.print(_grid(lines))
    for name, rows in tables:
        console.print()
        console.print(stages_of(rows) if name == "stages" else table_of(rows))
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
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if not items:
            return "none"
        return "; ".join(items) if isinstance(items[0], str) and " " in items[0] else listed(items)
    told = str(value)
    return f"{told[:_DIGEST]}…" if name.endswith("digest") and len(told) > _DIGEST else told


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
        table.add_row(Text(str(record["stage"])), Text(state, style=_STATES[state]), Text(figures))
    return table


def _dots(*parts: str) -> str:
    return " · ".join(p for p in parts if p)


def _states(f: Facts) -> list[tuple[str, str]]:
    if f.get("tool") == "draftline":
        return _plain(f)
    rows = f"{say('rows', f['rows'])} rows" + (
        f", {say('', f['rows_missing'])} missing" if f.get("rows_missing") else ""
    )
    tokens = (
        f"{say('', f['tokens'])} tokens" + (f" ({f['tokens_are']})" if f.get("tokens_are") else "")
        if f.get("tokens") is not None
        else ""
    )
    folders = many(f["folders"], "folder") if f.get("folders") else ""
    ids = f"ids {listed(f['layer_ids'])} as {f['written_in']} writes them" if f.get("layer_ids") else "no ids written"
    return [
        ("rows", _dots(rows, many(f["shards"], "shard") if "shards" in f else folders, tokens, size(f["bytes"]))),
        ("ranges", listed(f.get("ranges") or [])),
        ("layers", _dots(ids, _meaning(f))),
        ("", _others(f) if f.get("ambiguous") else ""),
        ("last state", _last(f)),
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


def _last(f: Facts) -> str:
    if f.get("states_in_a_row") == 3:
        return "not stored"
    known = {"before_final_norm": "before the final norm", "after_final_norm": "after the final norm"}
    return known.get(f["last_state"], "before or after the final norm: not recorded")


def _draft(f: Facts) -> list[tuple[str, str]]:
    head = f"lm_head {'×'.join(map(str, f['lm_head']))}" if f.get("lm_head") else "no lm_head"
    fed = f"fc {'×'.join(map(str, f['fc']))}, {f.get('states_fed')} states" if f.get("fc") else "no fc"
    maps = ", ".join(f"{'' if f.get(n) else 'no '}{n}" for n in ("d2t", "t2d"))
    embedding = "own embedding" if f.get("own_embedding") else "the target's embedding"
    vocab = f"draft vocabulary {say('', f.get('draft_vocab_size'))} of {say('', f.get('vocab_size'))}"
    block = ", ".join(f.get("block") or [])
    weights = _dots(f"{say('', f['parameters'])} parameters", f.get("dtype") or "", size(f["bytes"]), block)
    positions = f"up to {say('', f.get('max_position_embeddings'))} positions"
    tied = "tied embeddings" if f.get("tie_word_embeddings") else ""
    steps = f"for {f['exported_for']}, {say('', f['optimizer_steps'])} optimizer steps" if f.get("exported_for") else ""
    return [
        ("weights", weights),
        ("reads", _dots(fed, f"H {f.get('hidden_size')}", positions)),
        ("proposes", _dots(head, vocab, maps, embedding, tied)),
        ("trained on", _dots(f.get("points_in_words") or "not recorded", f.get("target") or f.get("verifier") or "")),
        ("exported", steps),
        ("digest", f.get("digest") or ""),
    ]


def _target(f: Facts) -> list[tuple[str, str]]:
    tied = "tied embeddings" if f.get("tie_word_embeddings") else ""
    sizes = (f"{f['layers']} layers", f"H {f.get('hidden_size')}", f"V {say('', f.get('vocab_size'))}")
    positions = f"up to {say('', f.get('max_position_embeddings'))} positions"
    weights = (f"{say('', f['parameters'])} parameters", f.get("dtype") or "", f.get("quantization") or "")
    template = "chat template" if f.get("chat_template") else "no chat template"
    usual = f"usual: after layer {listed(f['usual_points'])}; to capture them:" if f.get("usual_points") else ""
    return [
        ("shape", _dots(*sizes, positions, tied)),
        ("weights", _dots(*weights, size(f["bytes"]), many(f["files"], "file"))),
        ("text", _dots(listed(f.get("tokenizer") or []) or "no tokenizer", template)),
        ("points", usual),
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
    quiet = _IN_WORDS if "points_in_words" in f else set[str]()
    shown = {k: v for k, v in f.items() if not _is_table(v) and v not in (None, [], {}) and k not in quiet}
    return [(name.replace("_", " "), say(name, value)) for name, value in shown.items()]


_LINES = {"hidden_states": _states, "draft": _draft, "target": _target}
