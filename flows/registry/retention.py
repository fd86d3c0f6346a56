"""What a registry may forget: releases that neither a channel nor a rollback reaches, and blobs that no kept release names.

Kept are: what a pointer names; the last `keep_releases` of production's walk, which is as far as rollback goes; every record
younger than the grace period; every blob that a kept record names or that is younger than the grace. Records go before the
blobs they name, so a kill leaves nothing half there. Ages are by the store's own clock.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from flows.registry.blobs import blob_key
from flows.registry.channels import standing
from flows.registry.parcels import read_record, record_key
from flows.registry.store import Listed, Store

CHANNELS = ("candidate", "production")


@dataclass(frozen=True)
class Plan:
    """Keys to remove, records before blobs; names of the releases that stay."""

    records: tuple[Listed, ...]
    blobs: tuple[Listed, ...]
    kept: tuple[str, ...]
    now_s: float

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in (*self.records, *self.blobs))


def reached(store: Store, keep_releases: int) -> set[str]:
    """Names of the releases that a pointer, or a rollback within `keep_releases`, reaches."""
    names: set[str] = set()
    for channel in CHANNELS:
        now = standing(store, channel)
        if now is not None:
            names.add(now.entry.release)
            names.update(now.entry.walk[-keep_releases:] if channel == "production" else ())
    return names


def plan(store: Store, keep_releases: int, grace_s: float) -> Plan:
    """What could go; nothing is removed.

    Raises:
        DataError: a kept release's record, or a pointer, is missing or altered: then nothing may go.
    """
    now = _now(store)
    records, blobs = store.listing("records/"), store.listing("blobs/")  # listed before the pointers are read: what is
    names = reached(store, keep_releases)  # promoted meanwhile is younger than the grace
    kept = {r.key for r in records if r.modified_s > now - grace_s} | {record_key(n) for n in names}
    keep_blobs = {blob_key(digest) for key in kept for digest in read_record(store, _name_of(key)).files.values()}
    return Plan(
        records=tuple(r for r in records if r.key not in kept),
        blobs=tuple(b for b in blobs if b.key not in keep_blobs and b.modified_s <= now - grace_s),
        kept=tuple(sorted(_name_of(key) for key in kept)),
        now_s=now,
    )


def _name_of(key: str) -> str:
    return key.rsplit("/", 1)[-1].removesuffix(".json")


def _now(store: Store) -> float:
    """The time by the store's clock."""
    key = f"probe/{uuid.uuid4().hex}"
    store.create(key, b"now")
    found = store.look(key)
    store.delete(key)
    assert found is not None, "an object just written is there"
    return found.modified_s


def carry_out(store: Store, planned: Plan, keep_releases: int, grace_s: float) -> list[str]:
    """Remove what was planned, each looked at once more: what was written anew or promoted since stays. Gives the keys."""
    removed: list[str] = []
    for old in planned.records:
        if _name_of(old.key) not in reached(store, keep_releases) and _unchanged(store, old):
            store.delete(old.key)
            removed.append(old.key)
    again = plan(store, keep_releases, grace_s)
    still = {b.key for b in again.blobs}
    for old in planned.blobs:
        if old.key in still and _unchanged(store, old):
            store.delete(old.key)
            removed.append(old.key)
    return [*removed, *store.sweep(grace_s)]


def _unchanged(store: Store, old: Listed) -> bool:
    return store.look(old.key) == old
