"""The registry's own bytes: every file under the digest it is named by, every record, every pointer and ledger entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pydantic import ValidationError

from flows.auditing.model import Finding
from flows.registry import channels, parcels
from flows.registry.blobs import blob_key, digest_of
from flows.registry.store import Store
from stages.contracts.errors import DataError
from stages.contracts.release import Channel, ChannelEntry, ReleaseRecord

_MEND = "restore it from a version or a backup of the store"


def store_faults(store: Store) -> list[Finding]:
    """What of a registry, a folder or a bucket, is not as it was written; all of it is read.

    Raises:
        StoreError: it does not answer.
    """
    records, found = _records(store)
    found += _blobs(store)
    held = {listed.key for listed in store.listing("blobs/")}
    for record in records:
        lost = sorted(name for name, digest in record.files.items() if blob_key(digest) not in held)
        found += [
            Finding("missing", f"The registry does not hold {name} of release {record.name}",
                    f"{store.where}/{blob_key(record.files[name])}", expected=record.files[name], do=_MEND)
            for name in lost
        ]  # fmt: skip
    return found + list(_entries(store)) + list(_channels(store, {r.name for r in records}))


def _records(store: Store) -> tuple[list[ReleaseRecord], list[Finding]]:
    records: list[ReleaseRecord] = []
    found: list[Finding] = []
    for listed in store.listing("records/"):
        name = listed.key.removeprefix("records/").removesuffix(".json")
        try:
            records.append(parcels.read_record(store, name))
        except DataError as error:
            found.append(_told(error))
    return records, found


def _blobs(store: Store) -> list[Finding]:
    found: list[Finding] = []
    for listed in store.listing("blobs/"):
        expected = "sha256:" + listed.key.removeprefix("blobs/")
        got = digest_of(store, listed.key)
        if got != expected:
            where = f"{store.where}/{listed.key}"
            found.append(
                Finding("altered", "A file in the registry is not what its name says", where, expected, got, _MEND)
            )
    return found


def _entries(store: Store) -> Iterator[Finding]:
    """Each entry by itself: its seal, its bytes, its number. That they follow from one another is `_channels`'s."""
    for listed in store.listing("ledger/"):
        read = store.read(listed.key)
        data = read.data if read else b""
        try:
            entry = ChannelEntry.model_validate_json(data)
            good = entry.canonical() == data and listed.key == channels.ledger_key(entry.channel, entry.number)
        except ValidationError:
            good = False
        if not good:
            yield Finding("altered", "An entry of the registry's ledger is not as its seal says",
                          f"{store.where}/{listed.key}", do=_MEND)  # fmt: skip


def _channels(store: Store, names: set[str]) -> Iterator[Finding]:
    for channel in get_args(Channel):
        try:
            told = channels.entries(store, channel)
        except DataError as error:
            yield _told(error)
            continue
        if told and told[-1].release not in names:
            yield Finding("missing", f"Channel {channel} names a release that the registry does not hold",
                          f"{store.where}/{channels.pointer_key(channel)}", expected=told[-1].release,
                          got=", ".join(sorted(names)) or "none", do=_MEND)  # fmt: skip


def _told(error: DataError) -> Finding:
    return Finding("altered", error.what, error.where, error.expected, error.got, error.do)
