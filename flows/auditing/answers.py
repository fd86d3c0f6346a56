"""What people ask of an audit: which drafts used this source or row, and what changed between two releases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flows.auditing.model import Audit

_SHOWN = 8


@dataclass(frozen=True)
class Use:
    """A release whose draft was trained on what was asked for. `certain` is false when its rows cannot be told any more."""

    release: str
    draft: str
    what: str
    certain: bool = True


def uses_of_source(audits: Iterable[Audit], source: str) -> list[Use]:
    """Releases with this source, by its name, its licence, its kind or the digest of its origin."""
    found: list[Use] = []
    for audit in audits:
        sources = [t for t in audit.things.values() if t.kind == "source"]
        if not sources:
            found.append(
                Use(audit.release, audit.draft, "its sources cannot be told: the manifests are nowhere", False)
            )
        for thing in sources:
            name = thing.key.removeprefix("source:")
            facts = thing.facts
            if source in (name, facts.get("licence"), facts.get("kind"), facts.get("origin"), thing.digest):
                words = f"source {name}: {facts.get('rows', '')}, {facts.get('licence', '')}, rows {thing.digest}"
                found.append(Use(audit.release, audit.draft, words))
    return found


def uses_of_row(audits: Iterable[Audit], row: str) -> list[Use]:
    """Releases with this row; the head of a row's name is enough."""
    found: list[Use] = []
    for audit in audits:
        unnamed = [t.title for t in audit.things.values() if t.kind == "folder"]
        unnamed = unnamed[len(audit.folders) :]
        if unnamed or not audit.folders:
            found.append(Use(audit.release, audit.draft, "some of its rows cannot be told: configs are nowhere", False))
        for folder in audit.folders:
            for i, name in enumerate(folder.row_ids):
                if name.startswith(row):
                    where = f"row {name}: {folder.name}, row {folder.start + i} of source {folder.source}"
                    found.append(Use(audit.release, audit.draft, where))
    return found


@dataclass(frozen=True)
class Change:
    """One thing that is not the same in two releases."""

    what: str
    before: str
    after: str


def changes(before: Audit, after: Audit) -> list[Change]:
    """Everything that differs, from the parameters to single rows."""
    found = [*_values("params", _flat(before.params), _flat(after.params))]
    found += _values("code", before.code, after.code)
    for key in sorted({*before.things, *after.things}):
        if key.startswith(("rows:", "states:", "others:", "code", "evidence/")) or key in ("dvc.lock", "params"):
            continue
        one, other = before.things.get(key), after.things.get(key)
        if one is None or other is None:
            found.append(Change(key, "" if one is None else one.title, "" if other is None else other.title))
            continue
        if one.digest != other.digest:
            found.append(Change(key, one.digest, other.digest))
        found += _values(key, one.facts, other.facts)
    return [*found, *_rows(before, after)]


def _values(where: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            one, other = (str(side[name]) if name in side else "" for side in (before, after))
            yield Change(f"{where}: {name}", one, other)


def _flat(value: object, at: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {at: value}
    flat: dict[str, Any] = {}
    entries: dict[str, Any] = value  # type: ignore[assignment]
    for name, inner in entries.items():
        flat |= _flat(inner, f"{at}.{name}".lstrip("."))
    return flat


def _rows(before: Audit, after: Audit) -> Iterator[Change]:
    """Rows by source: how many are new, how many are gone, and the first of them."""
    sides = [_by_source(audit) for audit in (before, after)]
    for source in sorted({*sides[0], *sides[1]}):
        old, new = (side.get(source, set()) for side in sides)
        gone, come = sorted(old - new), sorted(new - old)
        if gone or come:
            yield Change(f"rows of {source}", _some("gone", gone), _some("new", come))


def _by_source(audit: Audit) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for folder in audit.folders:
        found.setdefault(folder.source, set()).update(folder.row_ids)
    return found


def _some(word: str, rows: list[str]) -> str:
    more = ", …" if len(rows) > _SHOWN else ""
    return f"{len(rows)} {word}" + (f": {', '.join(rows[:_SHOWN])}{more}" if rows else "")
