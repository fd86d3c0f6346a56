"""Promotion and rollback. `python -m flows.release promote | rollback | list | follow | fetch RELEASE TO | prune [delete]`

The registry that params.yaml names holds releases and who is production (flows/registry); releases/ is this clone's copy:

    releases/<12 hex digits of the record's digest>/  release.json, model_card.md, draft/, policy.json, serving/,
                                                      evidence/, gates/
    releases/current.json                             {"release": "<that name>"}; what a server here loads
    releases/ledger.jsonl                             who became production when (flows/ledger.py)

A release is named by its record, not by its draft alone: the same draft measured again may carry another policy. Its
files are copies: the draft in models/ shares its bytes with DVC's cache, and a release must not share their fate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flows import working_copy
from flows.demands import demand_gates, demand_no_step_back, demand_one_engine
from flows.held import held
from flows.judged import contents, demand_passed, record_of
from flows.ledger import entries as ledger
from flows.registry import channels, parcels, retention
from flows.registry.adopt import adopt
from flows.registry.probe import demand_conditional_writes
from flows.registry.store import Store, open_store
from stages.contracts.errors import DataError, Refusal
from stages.contracts.files import whole_folder
from stages.contracts.params import Registry, load_promotion, load_registry
from stages.contracts.release import RECORD, RELEASES, Channel, ReleaseRecord, current

__all__ = [
    "Release",
    "contents",
    "current",
    "fetch",
    "follow",
    "ledger",
    "list_releases",
    "promote",
    "propose",
    "record_of",
    "rollback",
]
_LOCK_WAIT_S = 60.0
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Release:
    """A folder in releases/ and its record."""

    name: str
    record: ReleaseRecord


@dataclass(frozen=True)
class Proposal:
    """A release that stands whole in the registry as candidate, the pointer it was judged against, and how it compares."""

    release: Release
    base: channels.Standing | None
    compared: str

    @property
    def is_production(self) -> bool:
        return self.base is not None and self.base.entry.release == self.release.name


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One writer of this clone's releases/; the kernel frees the lock of a killed one.

    Raises:
        Refusal: another process holds it for too long.
    """
    what = "Another promotion or rollback is under way in this clone"
    with held(root / RELEASES / ".lock", _LOCK_WAIT_S, Refusal, what):
        yield


def _open(root: Path) -> tuple[Registry, Store]:
    settings = load_registry(root / "params.yaml")
    store = open_store(settings, root)
    adopt(root, store, settings.grace_hours * _HOUR_S)
    return settings, store


def propose(root: Path = Path(), even_if_rolled_back: bool = False) -> Proposal:
    """Bring the draft that passed gate-deployment into the registry, whole, as candidate.

    Raises:
        Refusal: see flows/judged.py and flows/demands.py; production is another release than the one this clone judged against; the store has no
            conditional writes; or this draft was rolled back, and a weekly run that finds nothing new must not bring it
            back (`even_if_rolled_back` does).
        StoreError: the store was not reached, or failed at every try.
    """
    with _locked(root):
        settings, store = _open(root)
        demand_conditional_writes(store)
        demand_passed(root)
        demand_gates(root)
        demand_one_engine(root)
        made = contents(root)
        record = record_of(root, made)
        base = channels.standing(store, "production")
        proposal = Proposal(Release(record.name, record), base, "already production")
        if not proposal.is_production:
            _demand_judged_against(root, store, base)
            _demand_not_withdrawn(store, base, record, even_if_rolled_back)
            replaced = parcels.read_record(store, base.entry.release) if base else None
            compared = demand_no_step_back(root, replaced, load_promotion(root / "params.yaml"))
            proposal = replace(proposal, compared=compared)
        folder = working_copy.folder_of(root, record.name)
        if not folder.is_dir() or parcels.altered(folder, record):
            with whole_folder(folder) as aside:
                made.write(aside)
                record.write(aside / RECORD)
        if faults := parcels.altered(folder, record):
            raise DataError("These files changed while they were copied", where=str(folder), got=", ".join(faults))
        parcels.put_release(store, folder, record, settings.grace_hours * _HOUR_S)
        channels.put_up(store, "candidate", record.name, record.draft_digest, "")
    return proposal


def accept(root: Path, proposal: Proposal, words: str = "") -> Release:
    """Make a proposed release production, unless the pointer moved since it was judged; done again it changes nothing.

    Args:
        words: for the ledger, as who approved it.

    Raises:
        Refusal: another promotion or rollback came first; it tells which.
    """
    with _locked(root):
        _, store = _open(root)
        release, now = proposal.release, channels.standing(store, "production")
        if now is None or now.entry.release != release.name:
            told = "; ".join(filter(None, (proposal.compared, words)))
            entry = channels.next_entry(
                "production", proposal.base, "promote", release.name, release.record.draft_digest, told
            )
            try:
                channels.move(store, proposal.base, entry)
            except Refusal:
                now = channels.standing(store, "production")
                if now is None or now.entry.release != release.name:
                    raise
        working_copy.follow(root, store)
    return release


def promote(root: Path = Path(), even_if_rolled_back: bool = False, words: str = "") -> Release:
    """Make the draft that passed gate-deployment production; doing it again changes nothing.

    Raises:
        Refusal, DataError, StoreError: see `propose` and `accept`.
    """
    return accept(root, propose(root, even_if_rolled_back), words)


def _demand_judged_against(root: Path, store: Store, base: channels.Standing | None) -> None:
    """Raises Refusal when gate-deployment judged against another release than the one that is production."""
    here = current(root)
    if base is not None and base.entry.release != here:
        raise Refusal(
            "Production moved on since this draft was judged",
            where=f"{store.where}/{channels.pointer_key('production')}",
            expected=f"release {here or 'none'}, which this clone knows as production",
            got=f"release {base.entry.release}, {base.entry.action} at {base.entry.at} by {base.entry.by}",
            do="`python -m flows.release follow`, then `dvc repro -f gate-deployment`, which judges against that release",
        )


def _demand_not_withdrawn(store: Store, base: channels.Standing | None, record: ReleaseRecord, even_so: bool) -> None:
    if base is not None and record.draft_digest in base.entry.withdrawn and not even_so:
        raise Refusal(
            "This draft was rolled back",
            where=f"{store.where}/{channels.pointer_key('production')}",
            expected="another draft than one taken out of service",
            got=record.draft_digest,
            do="retrain on new rows or parameters; `python -m flows.release promote` brings this one back on purpose",
        )


def rollback(root: Path = Path(), words: str = "") -> Release:
    """Make the release before the current one production again. It needs the pointer, one record and, where this clone does
    not have the release whole, its files: a handful of requests, however long the ledger.

    Args:
        words: for the ledger, as why.

    Raises:
        Refusal: there is none before it, or another move came first.
        DataError: that release is damaged here and in the registry; the pointer stays.
    """
    with _locked(root):
        settings, store = _open(root)
        now = channels.standing(store, "production")
        walk = now.entry.walk if now else ()
        if now is None or len(walk) < 2:
            raise Refusal(
                "There is no release to roll back to",
                where=f"{store.where}/{channels.pointer_key('production')}",
                got=f"{len(walk)} promoted",
                do="`python -m flows.release list` names what there is",
            )
        name = walk[-2]
        folder = working_copy.folder_of(root, name)
        record = parcels.get_release(store, name, folder)
        if parcels.missing(store, record):
            parcels.put_release(store, folder, record, settings.grace_hours * _HOUR_S)
        entry = channels.next_entry("production", now, "rollback", name, record.draft_digest, words)
        channels.move(store, now, entry)
        working_copy.note(root, store, entry)
    return Release(name, record)


def follow(root: Path = Path()) -> Release | None:
    """Bring releases/ of this clone into step with the registry; none before the first promotion.

    Raises:
        DataError, StoreError: see flows/working_copy.py.
    """
    with _locked(root):
        _, store = _open(root)
        record = working_copy.follow(root, store)
    return Release(record.name, record) if record else None


def fetch(root: Path, which: str, to: Path) -> Release:
    """Write a release's folder whole to `to`; `which` is a name, or a channel for what it names now.

    Raises:
        Refusal: the channel names none, or `to` holds something else.
        DataError, StoreError: see flows/registry/parcels.py.
    """
    _, store = _open(root)
    name = which
    if which in retention.CHANNELS:
        now = channels.standing(store, which)
        if now is None:
            raise Refusal(f"Channel {which} names no release yet", where=store.where, do="promote one first")
        name = now.entry.release
    if to.exists() and any(to.iterdir() if to.is_dir() else [to]) and not (to / RECORD).exists():
        raise Refusal(
            "This folder holds something else", where=str(to), expected="a new or empty folder", do="name another"
        )
    record = parcels.get_release(store, name, to)
    return Release(record.name, record)


def list_releases(root: Path = Path()) -> str:
    """The ledger of production for a person, its release marked, and the candidate where it is another."""
    _, store = _open(root)
    told = channels.entries(store, "production")
    now = told[-1].release if told else None
    lines = [
        f"{'*' if e.release == now else ' '} {e.at}  {e.action:8}  {e.release}" + (f"  {e.words}" if e.words else "")
        for e in told
    ]
    waiting = channels.standing(store, "candidate")
    if waiting is not None and waiting.entry.release != now:
        lines.append(f"  {waiting.entry.at}  candidate {waiting.entry.release}")
    return "\n".join(lines) or "No release yet: `make retrain`, then `python -m flows.release promote`."


def prune(root: Path = Path(), delete: bool = False) -> str:
    """What retention would remove, in a line each; with `delete` it does, and says what went.

    Raises:
        DataError, StoreError: see flows/registry/retention.py; nothing is removed then.
    """
    settings, store = _open(root)
    grace_s = settings.grace_hours * _HOUR_S
    planned = retention.plan(store, settings.keep_releases, grace_s)
    kept = f"kept: {', '.join(planned.kept) or 'no release'}"
    if delete:
        gone = retention.carry_out(store, planned, settings.keep_releases, grace_s)
        return "\n".join([*(f"removed {key}" for key in gone), kept])
    would = [f"would remove {one.key} ({one.size_bytes} bytes)" for one in (*planned.records, *planned.blobs)]
    return "\n".join([*would, kept, *(["`python -m flows.release prune delete` does it"] if would else [])])


def release_markdown(release: Release) -> str:
    """A release for a person: its name, what it stands on, how well it does."""
    record = release.record
    rows = "\n".join(f"| {name} | {value:.2f} |" for name, value in sorted(record.accept_length_by_domain.items()))
    return (
        f"# Release {release.name}\n\nDraft `{record.draft_digest}`, {record.engine} {record.engine_version}\n\n"
        f"| accept length | tokens |\n|---|---|\n| all | {record.accept_length:.2f} |\n{rows}\n"
    )


def channel_of(word: str) -> Channel | None:
    """The channel that a word names, if it names one."""
    return next((c for c in retention.CHANNELS if c == word), None)


if __name__ == "__main__":
    from flows.release_command import main
    from stages.contracts.errors import run

    run(main)
