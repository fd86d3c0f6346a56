"""releases/ of this clone: the releases it has whole, which one production was when it last looked, and how it became that.

Everything here can be made again from the registry. Written after the registry was, so a killed writer leaves it behind,
never ahead; `follow` brings it up.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from flows.ledger import LEDGER, entries
from flows.registry import channels, parcels
from flows.registry.store import Store
from stages.contracts.errors import DataError
from stages.contracts.files import canonical, write_whole
from stages.contracts.release import POINTER, RELEASES, ChannelEntry, ReleaseRecord, current


def folder_of(root: Path, name: str) -> Path:
    return root / RELEASES / name


def follow(root: Path, store: Store) -> ReleaseRecord | None:
    """Bring current.json, its release and ledger.jsonl into step with production; gives its record, or none before the first.

    Raises:
        DataError: the registry, or the release that is production, is damaged; the pointer here stays.
        StoreError: see Store.
    """
    now = channels.standing(store, "production")
    if now is None:
        return None
    name = now.entry.release
    record = parcels.get_release(store, name, folder_of(root, name))
    note(root, store, now.entry)
    return record


def note(root: Path, store: Store, entry: ChannelEntry) -> None:
    """Write down who production is: the release's folder stands, so the pointer may name it."""
    _note_ledger(root, store)
    if _named(root) != entry.release:
        write_whole(root / POINTER, canonical({"release": entry.release}))


def _named(root: Path) -> str | None:
    try:
        return current(root)
    except DataError:  # written anew
        return None


def _note_ledger(root: Path, store: Store) -> None:
    """Add the entries that ledger.jsonl lacks; one that is not the registry's is written anew from its first line."""
    here = _seals(root)
    told = channels.entries(store, "production", after=max(len(here) - 1, 0))
    if here and (not told or told[0].seal != here[-1]):
        here, told = [], channels.entries(store, "production")
    else:
        told = told[1:] if here else told
    if not told:
        return
    path = root / LEDGER
    old = path.read_bytes() if here else b""
    lines = [json.dumps(e.model_dump(mode="json"), sort_keys=True).encode() + b"\n" for e in told]
    write_whole(path, old[: old.rfind(b"\n") + 1] + b"".join(lines))


def _seals(root: Path) -> list[str]:
    """Seals of the entries noted here; none when a line is no entry of a registry, or not as it was noted."""
    try:
        return [ChannelEntry.model_validate(entry).seal for entry in entries(root)]
    except (DataError, ValidationError):
        return []
