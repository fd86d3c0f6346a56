"""The audit of releases that stand in the registry alone; tests/flows/test_audit_registry_s3.py holds S3 to the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import release
from flows.audit import audit, chosen
from flows.auditing.model import Finding
from flows.auditing.registry_releases import NearestReleases, RegistryReleases
from flows.auditing.standing import registry_faults
from flows.registry.folder import FolderStore
from flows.registry.store import Garbled
from stages.contracts.draft import DraftRecord
from stages.contracts.files import canonical, file_digest
from stages.contracts.release import ReleaseRecord
from tests.flows.samples import write_draft, write_registry
from tests.flows.test_registry import shared


def nearest(root: Path, fresh: str = "fresh") -> tuple[Path, NearestReleases]:
    """A clone that never followed, and what it can audit."""
    clone = shared(root, fresh)
    return clone, NearestReleases(clone, FolderStore(root / "registry"))


def promoted(root: Path, *weights: bytes) -> list[str]:
    names: list[str] = []
    for some in weights:
        write_draft(shared(root, "made"), some)
        (root / "made/dvc.lock").write_bytes(b"lock of " + some)  # the sample's has the bytes of the weights
        names.append(release.promote(root / "made").name)
    return names


def record_of(root: Path, name: str) -> ReleaseRecord:
    return ReleaseRecord.read(root / f"registry/records/{name}.json")


def blob_of(root: Path, name: str, file: str) -> Path:
    return root / "registry/blobs" / record_of(root, name).files[file].removeprefix("sha256:")


def of_the_release(found: list[Finding]) -> list[tuple[str, str]]:
    """What is said of the release's own files: the samples have no data below them."""
    return [(f.fault, f.where) for f in found if "registry/" in f.where or f.where.startswith("releases/")]


def test_a_fresh_clone_audits_what_the_registry_holds_and_stays_as_it_was(tmp_path: Path) -> None:
    old, new = promoted(tmp_path, b"one", b"two")
    clone, store = nearest(tmp_path)
    assert store.names() == sorted((old, new)) and store.pointers() == {"current": new}
    assert chosen(store, [], False) == chosen(store, [new[:6]], False) == [new] and chosen(store, [old], False) == [old]
    assert [entry["release"] for entry in store.history()] == [old, new] and registry_faults(store) == []
    for told in audit(store, [old, new], clone):
        here = audit(NearestReleases(tmp_path / "made", FolderStore(tmp_path / "registry")), [told.release], clone)[0]
        assert {k: t.state for k, t in told.things.items()} == {k: t.state for k, t in here.things.items()}
        assert [f.what for f in told.findings] == [f.what for f in here.findings]
        weights = told.things["draft/model.safetensors"]
        assert weights.state == "verified"
        assert weights.copies[0].where == str(blob_of(tmp_path, told.release, "draft/model.safetensors"))
    assert sorted(p.name for p in clone.iterdir()) == ["params.yaml"]


def test_an_altered_or_missing_file_of_the_registry_is_named_where_it_lies(tmp_path: Path) -> None:
    (name,) = promoted(tmp_path, b"weights")
    clone, store = nearest(tmp_path)
    blob = blob_of(tmp_path, name, "draft/model.safetensors")
    blob.write_bytes(b"Weights")
    told = audit(store, [name], clone)[0]
    assert of_the_release(told.findings) == [("altered", str(blob))]
    found = told.findings[0]
    assert found.what == "draft/model.safetensors of the release is not what draft names"
    assert found.got == file_digest(blob) != found.expected
    assert told.things["draft/model.safetensors"].state == "altered" and told.things["draft"].state == "verified"
    blob.unlink()
    told = audit(nearest(tmp_path)[1], [name], clone)[0]
    assert of_the_release(told.findings) == [("missing", str(blob))]


def test_an_altered_record_of_the_registry_is_named_and_a_lost_one_is_no_release(tmp_path: Path) -> None:
    (name,) = promoted(tmp_path, b"weights")
    path = tmp_path / f"registry/records/{name}.json"
    record = record_of(tmp_path, name)
    path.write_bytes(record.model_copy(update={"accept_length": 9.0}).canonical())
    clone, store = nearest(tmp_path)
    found = audit(store, [name], clone)[0].findings[0]
    assert (found.fault, found.what) == ("altered", "A release's record is not the one it is named after")
    assert found.where == str(path) and found.expected == f"a record whose digest begins with {name}"
    path.write_bytes(b"no record")
    told = audit(nearest(tmp_path)[1], [name], clone)[0]
    assert told.findings[0].where == str(path) and list(told.things) == ["release"]
    path.unlink()
    clone, store = nearest(tmp_path)
    assert store.names() == []
    assert [f.what for f in registry_faults(store, 2)] == [
        "The pointer `current` names a release that is not there",
        "A release of the ledger is not there",
    ]


def test_an_answer_follows_no_altered_record_and_reads_no_weights(tmp_path: Path) -> None:
    (name,) = promoted(tmp_path, b"weights")
    clone, _ = nearest(tmp_path)
    asked: list[str] = []

    class Asked(FolderStore):
        def stream(self, key: str) -> Iterator[bytes]:
            asked.append(key)
            return super().stream(key)

    def keys() -> set[str]:
        told = audit(NearestReleases(clone, Asked(tmp_path / "registry")), [name], clone, hash_all=False)[0]
        return set(told.things)

    assert "merged" in keys()
    assert f"blobs/{blob_of(tmp_path, name, 'draft/model.safetensors').name}" not in asked
    assert len(asked) == len(set(asked)), "each file is asked for once"
    blob = blob_of(tmp_path, name, "draft/draft_record.json")
    good = blob.read_bytes()
    blob.write_bytes(DraftRecord.read(blob).model_copy(update={"steps_ahead": 4}).canonical())
    assert "merged" not in keys()
    blob.write_bytes(good)
    assert "merged" in keys()
    path = tmp_path / f"registry/records/{name}.json"
    path.write_bytes(record_of(tmp_path, name).model_copy(update={"accept_length": 9.0}).canonical())
    assert "draft" not in keys()


def test_a_release_that_stands_here_is_read_here_and_what_was_done_to_it_is_told(tmp_path: Path) -> None:
    old, new = promoted(tmp_path, b"one", b"two")
    made = tmp_path / "made"
    store = NearestReleases(made, FolderStore(tmp_path / "registry"))
    path = made / "releases" / new / "draft/model.safetensors"
    path.write_bytes(b"Two")
    shutil.rmtree(made / "releases" / old)
    here, far = audit(store, [new, old], made)
    assert of_the_release(here.findings) == [("altered", f"releases/{new}/draft/model.safetensors")]
    assert of_the_release(far.findings) == [] and far.things["draft/model.safetensors"].state == "verified"
    path.unlink()
    assert of_the_release(audit(store, [new], made)[0].findings) == [
        ("missing", f"releases/{new}/draft/model.safetensors")
    ]
    assert registry_faults(store) == []
    shutil.rmtree(made / "releases" / new)
    faults = registry_faults(store)
    assert [f.what for f in faults] == ["The pointer `current` names a release that is not there"]
    assert faults[0].got == new and "flows.release follow" in faults[0].do


def test_a_file_that_came_in_other_bytes_is_asked_for_again(tmp_path: Path) -> None:
    (name,) = promoted(tmp_path, b"weights")
    turns: dict[str, int] = {}

    class Flips(FolderStore):
        def stream(self, key: str) -> Iterator[bytes]:
            turns[key] = turn = turns.get(key, 0) + 1
            for piece in super().stream(key):
                yield piece if turn == 3 else bytes([piece[0] ^ 1]) + piece[1:]
            if turn == 2:
                raise Garbled("An object came in other bytes than S3 has")

    store = RegistryReleases(Flips(tmp_path / "registry"))
    with store.open(name, "draft/model.safetensors") as file:
        assert file.read() == b"weights"
    assert list(turns.values()) == [3]
    with pytest.raises(FileNotFoundError, match=f"records/{name}.json: draft/none"):
        store.open(name, "draft/none")


def test_what_retention_removed_is_no_fault_and_what_rollback_leads_to_is(tmp_path: Path) -> None:
    first, second, _ = promoted(tmp_path, b"one", b"two", b"three")
    write_registry(tmp_path / "made", keep_releases=2, grace_hours=1e-6)
    assert f"records/{first}.json" in release.prune(tmp_path / "made", delete=True)
    _, store = nearest(tmp_path)
    assert registry_faults(store, 2) == []
    assert [f.expected for f in registry_faults(store, 3)] == [first]
    (tmp_path / f"registry/records/{second}.json").unlink()
    assert [f.expected for f in registry_faults(nearest(tmp_path)[1], 2)] == [second]


def test_a_pointer_of_the_registry_that_was_edited_is_a_finding(tmp_path: Path) -> None:
    promoted(tmp_path, b"one")
    (tmp_path / "registry/channels/production.json").write_bytes(canonical({"release": "0" * 12}))
    faults = registry_faults(nearest(tmp_path)[1])
    assert [f.what for f in faults] == ["An entry of the registry cannot be believed"]
