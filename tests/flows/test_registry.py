"""The registry's store and its rules, on a folder; tests/flows/test_registry_s3.py holds S3 to the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flows import release, working_copy
from flows.registry import blobs, channels, parcels, probe, retention
from flows.registry.folder import FolderStore
from flows.registry.store import Found, Store
from stages.contracts.errors import DataError, ParamsError, Refusal
from stages.contracts.files import canonical, digest
from stages.contracts.params import load_registry
from stages.contracts.release import ReleaseRecord, current
from tests.flows.samples import write_draft, write_registry


def shared(root: Path, name: str) -> Path:
    """A clone whose registry is a folder beside it, and no draft yet."""
    clone = root / name
    clone.mkdir(parents=True, exist_ok=True)
    write_registry(clone, uri=str(root / "registry"))
    return clone


def conforms(store: Store, tmp_path: Path) -> None:
    """What every store has to do, whatever it stands on."""
    assert store.read("channels/x.json") is None and store.look("blobs/none") is None and store.listing("blobs/") == []
    assert store.create("channels/x.json", b"one") and store.create("channels/x.json", b"one")
    assert not store.create("channels/x.json", b"two")
    first = store.read("channels/x.json")
    assert first is not None and first.data == b"one"
    assert store.replace("channels/x.json", b"two", first.version)
    assert not store.replace("channels/x.json", b"three", first.version)
    assert not store.replace("channels/none.json", b"three", first.version)
    second = store.read("channels/x.json")
    assert second is not None and second.data == b"two" and second.version != first.version
    path = tmp_path / "a file"
    path.write_bytes(os.urandom(3000))
    file = digest(path.read_bytes())
    for _ in range(2):
        blobs.put_blob(store, path, file, 3600)
    key = blobs.blob_key(file)
    there = store.look(key)
    assert there is not None and there.size_bytes == 3000 and abs(there.modified_s - time.time()) < 60
    assert [one.key for one in store.listing("blobs/")] == [key] and b"".join(store.stream(key)) == path.read_bytes()
    blobs.get_blob(store, file, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    probe.demand_conditional_writes(store)
    assert store.listing("probe/") == []
    store.delete(key)
    store.delete(key)
    assert store.look(key) is None and store.sweep(0) == []


def test_a_folder_is_a_store(tmp_path: Path) -> None:
    conforms(FolderStore(tmp_path / "registry"), tmp_path)


class _Careless(FolderStore):
    """A store that takes conditions and ignores some."""

    def __init__(self, folder: Path, ignores: str) -> None:
        super().__init__(folder)
        self._ignores = ignores

    def create(self, key: str, data: bytes) -> bool:
        if self._ignores == "If-None-Match":
            self.delete(key)
        return super().create(key, data)

    def replace(self, key: str, data: bytes, version: str) -> bool:
        found = super().read(key)
        return super().replace(key, data, found.version if self._ignores == "If-Match" and found else version)


@pytest.mark.parametrize(
    ("ignores", "words"),
    [
        ("If-None-Match", "(created the same object|created where one was already)"),
        ("If-Match", "(replaced the same version|replaced under a version that was no longer its own)"),
    ],
)
def test_a_store_that_ignores_a_condition_is_refused_before_anything_is_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: str, words: str
) -> None:
    write_draft(tmp_path)
    monkeypatch.setattr(release, "open_store", lambda *_: _Careless(tmp_path / "releases/.registry", ignores))
    with pytest.raises(Refusal, match=rf"no conditional writes(.|\n)*{words}"):
        release.promote(tmp_path)
    assert current(tmp_path) is None and not (tmp_path / "releases/.registry/channels").exists()


def _promote(root: Path, told: Any) -> None:
    try:
        told.put(("won", release.promote(root).name))
    except Refusal as error:
        told.put(("lost", error.text()))


def twenty_at_once(clones: list[Path]) -> tuple[list[str], list[str]]:
    """Promote every clone's draft at once; gives the winners' releases and the losers' words."""
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    racing = [fork.Process(target=_promote, args=(clone, told)) for clone in clones]
    for process in racing:
        process.start()
    results = [told.get(timeout=240) for _ in racing]
    for process in racing:
        process.join(60)
    return [words for end, words in results if end == "won"], [words for end, words in results if end == "lost"]


def demand_one_winner(clones: list[Path]) -> None:
    """Of drafts that were all judged against the same production, one is promoted and the others are told which."""
    won, lost = twenty_at_once(clones)
    assert len(won) == 1 and len(lost) == len(clones) - 1
    for words in lost:
        assert ("came first" in words or "moved on" in words) and f"release {won[0]}, promote at " in words
        assert "release follow`, then `dvc repro -f gate-deployment`" in words
    told = [line for line in release.list_releases(clones[0]).splitlines() if " promote " in line]
    assert [line.replace("*", "").split()[2] for line in told] == won
    for clone in clones:
        followed = release.follow(clone)
        assert followed is not None and followed.name == won[0] == current(clone)
        assert len(release.ledger(clone)) == 1


def test_of_twenty_promotions_at_once_exactly_one_wins_and_the_others_are_told_who(tmp_path: Path) -> None:
    clones = [shared(tmp_path, f"clone {i}") for i in range(20)]
    for i, clone in enumerate(clones):
        write_draft(clone, b"draft %d" % i)
    demand_one_winner(clones)


def test_a_draft_judged_against_an_older_production_is_refused_until_it_is_judged_again(tmp_path: Path) -> None:
    one, other = shared(tmp_path, "one"), shared(tmp_path, "other")
    write_draft(one, b"a")
    write_draft(other, b"b")
    first = release.promote(one).name
    with pytest.raises(Refusal, match="Production moved on since this draft was judged") as told:
        release.promote(other)
    assert f"release {first}, promote at" in told.value.got and told.value.expected.startswith("release none")
    release.follow(other)
    second = release.promote(other).name
    assert current(other) == second and current(one) == first
    assert release.rollback(one).name == first, "from another clone, without the release before here"


def test_a_promotion_that_waited_while_another_came_first_is_told_who_won(tmp_path: Path) -> None:
    one, other = shared(tmp_path, "one"), shared(tmp_path, "other")
    write_draft(one, b"a")
    write_draft(other, b"b")
    waiting = release.propose(other)
    won = release.promote(one).name
    with pytest.raises(Refusal, match=rf"Another promote came first: this one changed nothing(.|\n)*release {won}"):
        release.accept(other, waiting, "approved by a person")


def test_a_rollback_from_a_fresh_clone_fetches_the_release_and_gives_its_reason(tmp_path: Path) -> None:
    clone = shared(tmp_path, "clone")
    for weights in (b"a", b"b"):
        write_draft(clone, weights)
        release.promote(clone)
    fresh = shared(tmp_path, "fresh")
    back = release.rollback(fresh, "canary fell to 1.0")
    folder = fresh / "releases" / back.name
    assert (folder / "draft/model.safetensors").read_bytes() == b"a" and current(fresh) == back.name
    assert parcels.altered(folder, back.record) == []
    assert release.ledger(fresh)[-1]["words"] == "canary fell to 1.0"
    assert "rollback" in release.list_releases(clone) and "canary fell" in release.list_releases(clone)


def test_fetch_takes_a_name_or_a_channel_and_leaves_other_folders_alone(tmp_path: Path) -> None:
    clone = shared(tmp_path, "clone")
    write_draft(clone, b"a")
    with pytest.raises(Refusal, match="Channel production names no release yet"):
        release.fetch(clone, "production", tmp_path / "to")
    made = release.promote(clone)
    for which in (made.name, "production", "candidate"):
        assert release.fetch(clone, which, tmp_path / "to").name == made.name
    assert (tmp_path / "to/draft/model.safetensors").read_bytes() == b"a"
    with pytest.raises(DataError, match="no such release"):
        release.fetch(clone, "0" * 12, tmp_path / "to")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thing").touch()
    with pytest.raises(Refusal, match="holds something else"):
        release.fetch(clone, made.name, tmp_path / "mine")
    with pytest.raises(DataError, match="no such release"):
        release.fetch(clone, "../ledger", tmp_path / "new")


def _alter(path: Path, old: bytes, new: bytes) -> bytes:
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    return whole


@pytest.mark.parametrize("what", ["pointer", "entry", "record"])
def test_any_altered_byte_of_a_pointer_entry_or_record_is_named_and_nothing_moves(tmp_path: Path, what: str) -> None:
    names = []
    for weights in (b"a", b"b"):
        write_draft(tmp_path, weights)
        names.append(release.promote(tmp_path).name)
    kept = tmp_path / "releases/.registry"
    path = {
        "pointer": kept / "channels/production.json",
        "entry": kept / "ledger/production/00000001.json",
        "record": kept / f"records/{names[0]}.json",
    }[what]
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DataError, match=r"cannot be believed|record was altered") as told:
            release.list_releases(tmp_path) if what == "entry" else release.rollback(tmp_path)
        assert str(path) in told.value.where
    path.write_bytes(whole)
    assert current(tmp_path) == names[1] and release.rollback(tmp_path).name == names[0]


def test_an_entry_exchanged_for_a_sealed_one_of_another_history_breaks_the_chain(tmp_path: Path) -> None:
    for clone in (tmp_path / "one", tmp_path / "other"):
        for weights in (b"a", b"b", b"c"):
            write_draft(clone, weights)
            release.promote(clone)
    path = "releases/.registry/ledger/production/00000002.json"
    (tmp_path / "one" / path).write_bytes((tmp_path / "other" / path).read_bytes())
    with pytest.raises(DataError, match=r"does not follow(.|\n)*previous"):
        release.list_releases(tmp_path / "one")
    (tmp_path / "one" / path).unlink()
    with pytest.raises(DataError, match=r"entry of the ledger is missing(.|\n)*entry 2"):
        release.list_releases(tmp_path / "one")


def _aged(folder: Path, hours: float) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - hours * 3600,) * 2)


def test_retention_tells_first_and_never_removes_what_a_pointer_or_a_rollback_reaches(tmp_path: Path) -> None:
    made = []
    for weights in (b"a", b"b", b"c", b"d"):
        write_draft(tmp_path, weights)
        made.append(release.promote(tmp_path))
    write_draft(tmp_path, b"e")
    candidate = release.propose(tmp_path).release
    (tmp_path / "releases/.registry/blobs/stray").write_bytes(b"of an upload that never ended in a record")
    assert "would remove" not in release.prune(tmp_path), "all is younger than the grace"
    _aged(tmp_path / "releases/.registry/blobs", 2)
    _aged(tmp_path / "releases/.registry/records", 2)
    told = release.prune(tmp_path)
    assert f"kept: {', '.join(sorted([made[2].name, made[3].name, candidate.name]))}" in told
    gone = {blobs.blob_key(m.record.files["draft/model.safetensors"]) for m in made[:2]}
    for key in (*gone, "blobs/stray", *(f"records/{m.name}.json" for m in made[:2])):
        assert f"would remove {key} " in told
        assert (tmp_path / "releases/.registry" / key).exists(), "nothing goes untold"
    assert "removed records/" in release.prune(tmp_path, delete=True)
    for key in (*gone, "blobs/stray"):
        assert not (tmp_path / "releases/.registry" / key).exists()
    for kept in (made[2], made[3], candidate):
        assert release.fetch(tmp_path, kept.name, tmp_path / f"to {kept.name}").record == kept.record
    assert release.rollback(tmp_path).name == made[2].name
    with pytest.raises(DataError, match=r"no such release(.|\n)*retention removes"):
        for name in (made[0].name, made[1].name):
            release.fetch(tmp_path, name, tmp_path / "gone")


def test_what_was_promoted_between_the_plan_and_its_carrying_out_stays(tmp_path: Path) -> None:
    write_draft(tmp_path, b"a")
    release.promote(tmp_path)
    write_draft(tmp_path, b"b")
    waiting = release.propose(tmp_path)
    write_draft(tmp_path, b"c")
    release.propose(tmp_path)
    for part in ("blobs", "records"):
        _aged(tmp_path / "releases/.registry" / part, 2)
    store = FolderStore(tmp_path / "releases/.registry")
    planned = retention.plan(store, 2, 3600)
    assert f"records/{waiting.release.name}.json" in [r.key for r in planned.records]
    made = release.accept(tmp_path, waiting)
    retention.carry_out(store, planned, 2, 3600)
    assert release.fetch(tmp_path, made.name, tmp_path / "to").record == made.record


def test_an_old_blob_that_a_new_release_names_again_is_written_anew_so_that_retention_spares_it(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "registry")
    path = tmp_path / "file"
    path.write_bytes(b"again")
    file = digest(b"again")
    blobs.put_blob(store, path, file, 3600)
    _aged(tmp_path / "registry", 0.6)
    blobs.put_blob(store, path, file, 3600)
    found = store.look(blobs.blob_key(file))
    assert found is not None and found.modified_s > time.time() - 60


def _old_folder(root: Path) -> list[str]:
    """releases/ as it was before there were registries: three promotions and a rollback, records that name no files."""
    lines, names, before = [], [], None
    for number, weights in enumerate((b"a", b"b", b"a2")):
        write_draft(root, weights)
        made = release.contents(root)
        record = release.record_of(root, made)
        old = ReleaseRecord.model_validate(record.model_dump() | {"files": {}})
        name = old.name
        made.write(root / "releases" / name)
        old.write(root / "releases" / name / "release.json")
        entry = {"at": f"2026-01-0{number + 1}T00:00:00Z", "action": "promote", "release": name, "before": before}
        lines.append(entry | {"draft": record.draft_digest})
        names.append(name)
        before = name
    back = {"at": "2026-01-09T00:00:00Z", "action": "rollback", "release": names[1], "before": names[2]}
    lines.append(back | {"draft": lines[1]["draft"]})
    (root / "releases/ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "releases/current.json").write_bytes(canonical({"release": names[1]}))
    return names


@pytest.mark.parametrize("at", ["moving", "noting", ""])
def test_a_release_folder_from_before_registries_is_taken_over_whole_even_when_killed_midway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    old = _old_folder(tmp_path)
    drafts = [entry["draft"] for entry in release.ledger(tmp_path)]
    if at:
        broken = {"moving": (channels, "settle"), "noting": (working_copy, "follow")}[at]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

            def stop(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(*broken, stop)
            release.follow(tmp_path)
    release.follow(tmp_path)
    told = release.ledger(tmp_path)
    assert [(e["action"], e["words"], e["at"][:10]) for e in told] == [
        ("promote", f"was release {old[0]}", "2026-01-01"),
        ("promote", f"was release {old[1]}", "2026-01-02"),
        ("promote", f"was release {old[2]}", "2026-01-03"),
        ("rollback", f"was release {old[1]}", "2026-01-09"),
    ]
    assert [e["draft"] for e in told] == drafts
    with pytest.raises(Refusal, match="was rolled back"):
        release.promote(tmp_path)
    back = release.rollback(tmp_path)
    assert (tmp_path / "releases" / back.name / "draft/model.safetensors").read_bytes() == b"a"


def test_an_old_folder_that_lacks_a_release_is_not_taken_over(tmp_path: Path) -> None:
    old = _old_folder(tmp_path)
    (tmp_path / "releases" / old[0] / "release.json").unlink()
    with pytest.raises(DataError, match=rf"names is not there\n  where: .*{old[0]}"):
        release.follow(tmp_path)
    assert current(tmp_path) == old[1]


def test_a_clone_does_not_begin_anew_in_an_empty_registry(tmp_path: Path) -> None:
    clone = shared(tmp_path, "clone")
    write_draft(clone, b"a")
    name = release.promote(clone).name
    write_registry(clone, uri=str(tmp_path / "elsewhere"))
    with pytest.raises(Refusal, match=rf"no production release, but this clone follows one(.|\n)*release {name}"):
        release.promote(clone)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"uri": "s3:bucket"}, "names no bucket"),
        ({"uri": "gs://bucket/x"}, "neither a folder nor s3"),
        ({"endpoint_url": "localhost:8333"}, "does not start with http"),
        ({"endpoint_url": "http://key:secret@host"}, "credentials come from the environment"),
        ({"retries": 21}, "registry.retries"),
        ({"secret_key": "x"}, "registry.secret_key"),
    ],
)
def test_a_fault_in_the_registry_section_is_told(tmp_path: Path, change: dict[str, object], words: str) -> None:
    write_registry(tmp_path, **change)
    with pytest.raises(ParamsError, match=words):
        load_registry(tmp_path / "params.yaml")


def test_a_files_path_that_leads_out_of_the_release_is_refused(tmp_path: Path) -> None:
    write_draft(tmp_path)
    made = release.promote(tmp_path)
    bad = made.record.model_copy(update={"files": {"../../x": next(iter(made.record.files.values()))}})
    store = FolderStore(tmp_path / "releases/.registry")
    store.create(parcels.record_key(bad.name), bad.canonical())
    with pytest.raises(DataError, match="outside its folder"):
        release.fetch(tmp_path, bad.name, tmp_path / "to")
    assert not (tmp_path / "to").exists() and isinstance(store.read("channels/production.json"), Found)
