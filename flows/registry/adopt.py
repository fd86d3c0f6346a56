"""A releases/ folder from before there were registries becomes one: its ledger's moves, its releases, its pointer.

Old records do not name their files, so each release gets a record that does, and with it a new name; every entry tells the
old one. Done again after a kill it writes the same bytes; the pointer goes last.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from flows import ledger
from flows.registry import channels, parcels
from flows.registry.store import Store
from stages.contracts.errors import DataError, Refusal
from stages.contracts.files import digest, whole_folder
from stages.contracts.release import POINTER, RECORD, RELEASES, ChannelEntry, ReleaseRecord, current, sealed

_KEPT_AS = "ledger.before_registry.jsonl"


def adopt(root: Path, store: Store, grace_s: float) -> None:
    """Bring an old folder's releases and moves into a registry that has none; nothing to do where there is no old folder.

    Raises:
        Refusal: this clone follows a registry, and the one that params.yaml names is empty.
        DataError: the old ledger contradicts itself, or a release that it names is missing.
    """
    if channels.standing(store, "production") is not None or current(root) is None:
        return
    told = ledger.entries(root)
    if told and "seal" in told[-1]:
        raise Refusal(
            "The registry has no production release, but this clone follows one",
            where=store.where,
            expected=f"the registry in which release {current(root)} is production",
            got="no pointer",
            do="mend registry.uri in params.yaml; if its pointer was lost, restore it from a backup of the store "
            "(its bytes are the last file in ledger/production); to begin anew, move releases/ aside",
        )
    ledger.promoted(root)
    moved = _moves(root, store, told, grace_s)
    for entry in moved[:-1]:
        channels.settle(store, entry)
    store.create(channels.pointer_key("production"), moved[-1].canonical())
    channels.settle(store, moved[-1])
    path = root / ledger.LEDGER
    if path.exists():
        path.rename(path.with_name(_KEPT_AS))


def _moves(root: Path, store: Store, told: list[dict[str, Any]], grace_s: float) -> list[ChannelEntry]:
    moved: list[ChannelEntry] = []
    names: dict[str, ReleaseRecord] = {}
    for line in [*told, *_untold(root, told)]:
        old = str(line["release"])
        if old not in names:
            names[old] = _adopted(root, store, old, grace_s)
        now = channels.Standing(moved[-1], "") if moved else None
        entry = channels.next_entry(
            "production",
            now,
            line["action"],
            names[old].name,
            names[old].draft_digest,
            f"was release {old}",
            line["at"],
        )
        fields = entry.model_dump(mode="json") | {"by": "not told", "move": digest(repr(sorted(line.items())).encode())}
        moved.append(sealed(**fields))
    return moved


def _untold(root: Path, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A pointer that moved without an entry: its writer was killed between the two."""
    name = current(root)
    if told and told[-1]["release"] == name:
        return []
    past = ledger.promoted(root)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((root / POINTER).stat().st_mtime))
    return [{"at": at, "action": "rollback" if len(past) > 1 and past[-2] == name else "promote", "release": name}]


def _adopted(root: Path, store: Store, old: str, grace_s: float) -> ReleaseRecord:
    """An old release under a record that names its files, in the registry and beside the old folder."""
    source = root / RELEASES / old
    if not (source / RECORD).exists():
        raise DataError(
            "A release that the ledger names is not there",
            where=str(source),
            expected="its folder, to be taken into the registry",
            do="put it back from a backup, or move releases/ aside to begin a registry anew",
        )
    was = ReleaseRecord.read(source / RECORD)
    record = was.model_copy(update={"files": parcels.described(source)})
    folder = root / RELEASES / record.name
    if not folder.is_dir() or parcels.altered(folder, record):
        with whole_folder(folder) as aside:
            shutil.copytree(source, aside, dirs_exist_ok=True, copy_function=shutil.copyfile)
            record.write(aside / RECORD)
    parcels.put_release(store, folder, record, grace_s)
    return record
