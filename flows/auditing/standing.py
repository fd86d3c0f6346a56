"""The registry itself: does each pointer name a release that is there, and does the history lead to it?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from flows.auditing.facts import fact_of
from flows.auditing.model import Finding
from flows.auditing.releases import RECORD, Releases
from stages.contracts.errors import DataError
from stages.contracts.release import ReleaseRecord

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)")

_WORDS = {"at", "action", "release", "before", "draft"}


def registry_faults(store: Releases, keep_releases: int | None = None) -> list[Finding]:
    """What is wrong beside the releases themselves.

    Args:
        keep_releases: as retention keeps them: what lies further back than so many may be gone. None = all have to be there.
    """
    names = set(store.names())
    try:
        pointers = store.pointers()
    except DataError as error:
        return [_told(error)]
    faults = [
        Finding("altered", f"The pointer `{pointer}` names a release that is not there", store.where(name),
                expected=f"one of {', '.join(sorted(names)) or 'none'}", got=name,
                do="`python -m flows.release list` names the releases; point it at the last one that is sound")
        for pointer, name in pointers.items() if name not in names
    ]  # fmt: skip
    try:
        entries = store.history()
    except DataError as error:
        return [*faults, _told(error)]
    last = entries[-1]["release"] if entries else None
    now = pointers.get("current", last)
    if now != last:
        faults.append(
            Finding("altered", "The pointer and the ledger's last entry name different releases", "current",
                    expected=str(last), got=str(now),
                    do="if a promotion was killed, promote again and it is settled; else find out who moved the pointer")
        )  # fmt: skip
    faults += _mistold(store, entries, names)
    gone = sorted(_demanded(entries, keep_releases) - names)
    faults += [
        Finding("missing", "A release of the ledger is not there", store.where(name), expected=name,
                do="restore it from a backup: no rollback leads to it until then")
        for name in gone
    ]  # fmt: skip
    return faults


def _demanded(entries: list[dict[str, Any]], keep_releases: int | None) -> set[str]:
    """Releases of the ledger that have to be there: those that rollback leads to, where the last entry tells its walk."""
    if keep_releases is not None and entries and "walk" in entries[-1]:
        return {str(name) for name in entries[-1]["walk"][-keep_releases:]}
    return {str(entry["release"]) for entry in entries}


def _mistold(store: Releases, entries: list[dict[str, Any]], names: set[str]) -> Iterator[Finding]:
    """Entries that name another draft than their release does, or times that do not go forward."""
    before = ""
    for number, entry in enumerate(entries, start=1):
        name, at = str(entry["release"]), str(entry["at"])
        record = _record(store, name) if name in names else None
        if record is not None and record.draft_digest != entry.get("draft"):
            yield Finding("altered", "The ledger names another draft than the release's record", f"ledger: entry {number}",
                          expected=record.draft_digest, got=str(entry.get("draft")), do="put the ledger back from a backup")  # fmt: skip
        if not entry.keys() >= _WORDS:
            yield Finding("altered", "An entry of the ledger lacks a word", f"ledger: entry {number}",
                          expected=", ".join(sorted(_WORDS)), got=", ".join(entry), do="put the ledger back from a backup")  # fmt: skip
        if not _TIME.fullmatch(at) or at < before:
            yield Finding("altered", "The times of the ledger do not go forward", f"ledger: entry {number}",
                          expected=f"a time, not before {before or 'any'}", got=at, do="put the ledger back from a backup")  # fmt: skip
        before = at


def _record(store: Releases, name: str) -> ReleaseRecord | None:
    try:
        with store.open(name, RECORD) as file:
            return fact_of(ReleaseRecord, file.read())
    except FileNotFoundError:
        return None  # the release's own audit says so


def _told(error: DataError) -> Finding:
    return Finding("altered", error.what, error.where, error.expected, error.got, error.do)
