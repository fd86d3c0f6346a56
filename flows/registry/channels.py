"""Who is candidate and who is production: one pointer a channel, moved by conditional writes, and a ledger of every move.

The pointer is its channel's last entry. A move writes entry n + 1 over exactly the bytes of entry n, so of several writers
one wins, and it is that write alone that decides. The ledger's copy of an entry is written after it became the pointer and
once more before it is replaced: a writer killed between the two loses nothing.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from pydantic import ValidationError

from flows.registry.store import Found, Store
from stages.contracts.errors import DataError, Refusal
from stages.contracts.release import Channel, ChannelEntry, sealed

_READS = 4  # of an entry whose bytes came out wrong
_TRIES = 50  # of a move that does not mind who was there before
_AT_ONCE = 8


@dataclass(frozen=True)
class Standing:
    """A channel's pointer as it was read: what a move has to find unchanged."""

    entry: ChannelEntry
    version: str

    @property
    def digest(self) -> str:
        return self.entry.digest()


def pointer_key(channel: Channel) -> str:
    return f"channels/{channel}.json"


def ledger_key(channel: Channel, number: int) -> str:
    return f"ledger/{channel}/{number:08d}.json"


def standing(store: Store, channel: Channel) -> Standing | None:
    """The channel's pointer, or none before its first move.

    Raises:
        DataError: its bytes are no entry of this channel, every time they were read.
    """
    found = _entry(store, pointer_key(channel), channel)
    return found and Standing(*found)


def _entry(store: Store, key: str, channel: Channel) -> tuple[ChannelEntry, str] | None:
    fault = ""
    for _ in range(_READS):
        found: Found | None = store.read(key)
        if found is None:
            return None
        try:
            entry = ChannelEntry.model_validate_json(found.data)
        except ValidationError as error:
            fault = "; ".join(f"{'.'.join(map(str, f['loc'])) or 'entry'}: {f['msg']}" for f in error.errors())
            continue
        if entry.canonical() == found.data and entry.channel == channel:
            return entry, found.version
        fault = f"an entry of channel {entry.channel}, or not in the bytes that it was written in"
    raise DataError(
        "An entry of the registry cannot be believed",
        where=f"{store.where}/{key}",
        expected=f"an entry of channel {channel}, under its own seal",
        got=fault,
        do=f"it was altered: restore it from a version or a backup of the store (a pointer's bytes also stand in ledger/{channel})",
    )


def next_entry(
    channel: Channel, now: Standing | None, action: str, release: str, draft: str, words: str, at: str = ""
) -> ChannelEntry:
    """The entry that a move would write over `now`."""
    before = now.entry if now else None
    walk, withdrawn = (before.walk, before.withdrawn) if before else ((), ())
    if action == "rollback":
        assert before is not None, "a rollback has something to go back from"
        walk, withdrawn = walk[:-1], tuple(sorted({*withdrawn, before.draft} - {draft}))
    else:
        walk, withdrawn = (*walk, release), tuple(d for d in withdrawn if d != draft)
    return sealed(
        channel=channel,
        number=before.number + 1 if before else 1,
        action=action,
        release=release,
        before=before.release if before else None,
        draft=draft,
        at=at or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        by=_who(),
        words=words,
        walk=walk,
        withdrawn=withdrawn,
        previous=now.digest if now else "",
        move=uuid.uuid4().hex,
    )


def _who() -> str:
    run = os.environ.get("PREFECT__FLOW_RUN_ID", "")
    return f"{getpass.getuser()}@{socket.gethostname()}" + (f", flow run {run}" if run else "")


def move(store: Store, now: Standing | None, entry: ChannelEntry) -> ChannelEntry:
    """Make `entry` the pointer in the place of exactly `now`; gives the entry that stands then.

    Raises:
        Refusal: the pointer is another by now; it tells who moved it.
    """
    key, data = pointer_key(entry.channel), entry.canonical()
    if now is not None:
        settle(store, now.entry)
    won = store.create(key, data) if now is None else store.replace(key, data, now.version)
    if won:
        settle(store, entry)
        return entry
    raise lost(store, entry, standing(store, entry.channel))


def settle(store: Store, entry: ChannelEntry) -> None:
    """Write an entry that was the pointer into the ledger, where it may stand already.

    Raises:
        DataError: another entry stands under its number.
    """
    key = ledger_key(entry.channel, entry.number)
    if not store.create(key, entry.canonical()):
        raise DataError(
            "The ledger holds another entry than the pointer had under this number",
            where=f"{store.where}/{key}",
            expected=entry.digest(),
            do="one of the two was altered: restore it from a version or a backup of the store; until then nothing moves",
        )


def lost(store: Store, mine: ChannelEntry, winner: Standing | None) -> Refusal:
    """What the loser of a race is told: who won."""
    who = winner.entry if winner else None
    return Refusal(
        f"Another {who.action if who else 'move'} came first: this one changed nothing",
        where=f"{store.where}/{pointer_key(mine.channel)}",
        expected=f"release {mine.before or 'none'}, as this one was judged against",
        got=f"release {who.release}, {who.action} at {who.at} by {who.by}"
        if who
        else "nothing: the pointer was removed",
        do="`python -m flows.release follow`, then `dvc repro -f gate-deployment`, which judges against the release that is there now",
    )


def put_up(store: Store, channel: Channel, release: str, draft: str, words: str) -> ChannelEntry:
    """Move a channel to a release whoever was there before; every move is in the ledger all the same.

    Raises:
        Refusal: others moved it at every try.
    """
    entry = None
    for _ in range(_TRIES):
        now = standing(store, channel)
        if now is not None and now.entry.release == release:
            return now.entry
        entry = next_entry(channel, now, "promote", release, draft, words)
        try:
            return move(store, now, entry)
        except Refusal:
            continue
    assert entry is not None
    raise lost(store, entry, standing(store, channel))


def entries(store: Store, channel: Channel, after: int = 0) -> list[ChannelEntry]:
    """The ledger of a channel behind entry `after`, oldest first, the pointer's own entry last; its chain is whole.

    Raises:
        DataError: an entry is missing, altered, or does not follow from the one before it.
    """
    now = standing(store, channel)
    if now is None:
        return []
    numbers = range(after + 1, now.entry.number)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        told = [*pool.map(lambda n: _told(store, channel, n), numbers), now.entry]
    for earlier, later in pairwise(told):
        _demand_follows(store, earlier, later)
    if after == 0 and (told[0].previous or told[0].before):
        _demand_follows(store, None, told[0])
    return told if now.entry.number > after else []


def _told(store: Store, channel: Channel, number: int) -> ChannelEntry:
    key = ledger_key(channel, number)
    found = _entry(store, key, channel)
    if found is None or found[0].number != number:
        raise DataError(
            "An entry of the ledger is missing",
            where=f"{store.where}/{key}",
            expected=f"entry {number} of channel {channel}",
            got="nothing" if found is None else f"entry {found[0].number}",
            do="restore it from a version or a backup of the store; rollback works without it, the audit does not",
        )
    return found[0]


def _demand_follows(store: Store, earlier: ChannelEntry | None, later: ChannelEntry) -> None:
    was = Standing(earlier, "") if earlier else None
    good = (later.previous, later.before) == (was.digest if was else "", earlier.release if earlier else None)
    if good and later.action == "rollback":
        good = earlier is not None and len(earlier.walk) > 1 and later.release == earlier.walk[-2]
    if good:
        like = next_entry(later.channel, was, later.action, later.release, later.draft, later.words, later.at)
        good = (like.walk, like.withdrawn, like.number) == (later.walk, later.withdrawn, later.number)
    if not good:
        raise DataError(
            "An entry of the ledger does not follow from the one before it",
            where=f"{store.where}/{ledger_key(later.channel, later.number)}",
            expected=f"an entry that follows {was.digest if was else 'nothing: it is the first'}",
            got=f"{later.action} of {later.release}, before: {later.before}, previous: {later.previous or 'none'}",
            do="an entry was altered or taken from another registry: restore it from a version or a backup of the store",
        )
