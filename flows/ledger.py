"""The release ledger as this clone notes it: who became production when. releases/ledger.jsonl, a line an entry.

An entry names the release that it made current and the one that was current before it, so that the entries can be walked:
a line lost or edited shows where the walk breaks. The registry's own entries (flows/registry/channels.py) decide; these lines
are copies of them, and before there were registries they were all there was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stages.contracts.errors import DataError
from stages.contracts.release import RELEASES

LEDGER = RELEASES / "ledger.jsonl"


def entries(root: Path = Path()) -> list[dict[str, object]]:
    """All entries, oldest first; a last line without its newline was cut off by a crash and does not count.

    Raises:
        DataError: a whole line is no entry.
    """
    path = root / LEDGER
    data = path.read_bytes() if path.exists() else b""
    return [_entry(path, number, line) for number, line in enumerate(data.split(b"\n")[:-1], start=1)]


def _entry(path: Path, number: int, line: bytes) -> dict[str, object]:
    try:
        entry: Any = json.loads(line)
    except ValueError:  # bytes that are no UTF-8, or no JSON
        entry = {}
    words = ("at", "action", "release", "draft")
    good = isinstance(entry, dict) and all(isinstance(entry.get(w), str) for w in words)
    if not good or entry["action"] not in ("promote", "rollback") or Path(entry["release"]).name != entry["release"]:
        raise DataError(
            "A line of the ledger is no entry",
            where=f"{path}: line {number}",
            expected='one JSON object with "at", "action" (promote or rollback), "release", "before" and "draft"',
            got=line[:200].decode(errors="replace"),
            do="mend this line from a backup or from releases/*/release.json; rollback walks back through these lines",
        )
    return entry


def promoted(root: Path) -> list[str]:
    """The releases a rollback walks back through, oldest first, the current one last.

    Raises:
        DataError: an entry does not follow from those before it.
    """
    names: list[str] = []
    for number, entry in enumerate(entries(root), start=1):
        _demand_follows(root / LEDGER, number, entry, names)
        if entry["action"] == "rollback":
            names.pop()
        else:
            names.append(str(entry["release"]))
    return names


def _demand_follows(path: Path, number: int, entry: dict[str, object], names: list[str]) -> None:
    was = names[-1] if names else None
    expected = f'"before": {json.dumps(was)}, which the lines above made current' if was else '"before": null'
    good = entry.get("before") == was
    if good and entry["action"] == "rollback":
        good = len(names) > 1 and entry["release"] == names[-2]
        back = f"a rollback to {names[-2]}" if len(names) > 1 else "a promotion: there is nothing to roll back to yet"
        expected = f"{back}, the releases so far being {', '.join(names) or 'none'}"
    if not good:
        raise DataError(
            "An entry of the ledger does not follow from those before it",
            where=f"{path}: line {number}",
            expected=expected,
            got=json.dumps({k: entry.get(k) for k in ("action", "release", "before")}),
            do="a line was lost or edited: put the ledger back from a backup, or mend this line and those above it "
            "(`python -m flows.release list` shows them); until then nothing is promoted or rolled back",
        )


def rolled_back(root: Path) -> set[str]:
    """Digests of the drafts that were taken out of service and not brought back since.

    Raises:
        DataError: see `promoted`.
    """
    promoted(root)  # from here on every `before` is a release named above it
    drafts: set[str] = set()
    draft_of: dict[object, str] = {}
    for entry in entries(root):
        draft_of[entry["release"]] = str(entry["draft"])
        if entry["action"] == "rollback":
            drafts.add(draft_of[entry["before"]])
        drafts.discard(str(entry["draft"]))
    return drafts
