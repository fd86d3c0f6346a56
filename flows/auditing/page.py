"""The audit as one self-contained HTML page: the chain as a graph, what is wrong, and every digest. No script, no network.

The graph is laid out here: a column a kind of thing, from the release to the sources, and a curve for each bond. Many row
folders are one box that says how many, or one box each for those at fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flows.auditing.model import Audit, Finding, State, Thing
from stages.contracts.files import write_whole

_COLUMNS = (
    ("release",),
    ("draft", "gate", "engine", "lock"),
    ("merged", "params", "code", "evidence"),
    ("states", "folder", "target"),
    ("prepared",),
    ("source",),
    ("licence",),
)
_DRAWN = {kind: column for column, kinds in enumerate(_COLUMNS) for kind in kinds}
_WIDE, _HIGH, _GAP_X, _GAP_Y = 166, 40, 44, 12
_FEW = 4


@dataclass(frozen=True)
class Box:
    key: str
    title: str
    state: State
    x: int
    y: int
    note: str

    @property
    def short(self) -> str:
        return self.title if len(self.title) <= 22 else self.title[:21] + "…"


@dataclass(frozen=True)
class Curve:
    path: str
    state: State


@dataclass(frozen=True)
class Graph:
    boxes: list[Box]
    curves: list[Curve]
    width: int
    height: int


def graph(audit: Audit) -> Graph:
    """Boxes and curves of one release."""
    shown = {t.key: t for t in audit.things.values() if t.kind in _DRAWN}
    merged = _gathered(audit, shown)
    columns: list[list[Thing]] = [[] for _ in _COLUMNS]
    for thing in shown.values():
        columns[_DRAWN[thing.kind]].append(thing)
    columns = [c for c in columns if c]
    rows = max((len(c) for c in columns), default=0)
    height = rows * (_HIGH + _GAP_Y) - _GAP_Y
    boxes: dict[str, Box] = {}
    for i, column in enumerate(columns):
        top = (height - (len(column) * (_HIGH + _GAP_Y) - _GAP_Y)) // 2
        for k, thing in enumerate(column):
            note = thing.facts.get("licence") or thing.digest.removeprefix("sha256:")[:12]
            x, y = i * (_WIDE + _GAP_X), top + k * (_HIGH + _GAP_Y)
            boxes[thing.key] = Box(thing.key, thing.title, thing.state, x, y, note)
    bonds = dict.fromkeys((merged.get(b.above, b.above), merged.get(b.below, b.below)) for b in audit.bonds)
    curves = [_curve(boxes[a], boxes[b]) for a, b in bonds if a in boxes and b in boxes and a != b]
    width = len(columns) * (_WIDE + _GAP_X) - _GAP_X
    return Graph(list(boxes.values()), curves, max(width, _WIDE), max(height, _HIGH))


def _gathered(audit: Audit, shown: dict[str, Thing]) -> dict[str, str]:
    """Put many sound row folders in one box; gives the box each of them went to. A folder is as its states are."""
    folders = [t for t in shown.values() if t.kind == "folder"]
    for thing in folders:
        states = audit.things.get(thing.key.replace("rows:", "states:", 1))
        copies = [*thing.copies, *(states.copies if states else [])]
        shown[thing.key] = Thing(thing.key, "folder", thing.title, thing.digest, copies, thing.facts)
    sound = [t for t in folders if shown[t.key].state != "altered"]
    if len(sound) <= _FEW:
        return {}
    states = (audit.things.get(t.key.replace("rows:", "states:", 1)) for t in sound)
    unseen = sum(s is None or not s.copies for s in states)
    title = f"{len(sound)} row folders" + (f", {unseen} unreachable" if unseen else "")
    shown["folders"] = Thing("folders", "folder", title, copies=[] if unseen else sound[0].copies)
    for thing in sound:
        del shown[thing.key]
    return {t.key: "folders" for t in sound}


def _curve(one: Box, other: Box) -> Curve:
    """From the right side of one box to the left of another; around, when it is not to the right."""
    y1, y2 = one.y + _HIGH // 2, other.y + _HIGH // 2
    if other.x > one.x:
        x1, x2 = one.x + _WIDE, other.x
        half = (x1 + x2) // 2
        return Curve(f"M{x1} {y1} C{half} {y1} {half} {y2} {x2} {y2}", other.state)
    x = max(one.x, other.x) + _WIDE
    return Curve(f"M{one.x + _WIDE} {y1} C{x + 30} {y1} {x + 30} {y2} {other.x + _WIDE} {y2}", other.state)


def write_page(path: Path, audits: Sequence[Audit], faults: Sequence[Finding]) -> None:
    """One page of all these releases."""
    write_whole(path, render(audits, faults).encode())


def render(audits: Sequence[Audit], faults: Sequence[Finding]) -> str:
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["digest"] = lambda value: value.removeprefix("sha256:")[:16]
    return environment.get_template("audit.html").render(
        css=Markup((here / "audit.css").read_text(encoding="utf-8")),
        audits=[(audit, graph(audit)) for audit in audits],
        faults=faults,
        wrong=len(faults) + sum(len(a.findings) for a in audits),
        wide=_WIDE,
        high=_HIGH,
        rows={a.release: sum(len(f.row_ids) for f in a.folders) for a in audits},
    )
