"""The audit of a promoted draft without a line under it: what it says of what is not there, and the words it finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows import release
from flows.audit import audit, chosen
from flows.auditing import tree
from flows.auditing.answers import changes, uses_of_row, uses_of_source
from flows.auditing.model import Audit, Bond, Copy, Finding, RowFolder, Thing
from flows.auditing.page import graph, render
from flows.auditing.releases import FolderReleases
from flows.auditing.remotes import FolderRemote, remotes
from flows.auditing.standing import registry_faults
from stages.contracts.errors import LineError
from stages.contracts.provenance import read_lock
from tests.flows.samples import write_draft

GOOD = Copy("release", "there", True)
LOCK = b"""schema: '2.0'
stages:
  prepare:
    cmd: x
    deps:
    - {path: stages/prepare.py, hash: md5, md5: aa, size: 1}
    params:
      params.yaml: {prepare: {seed: 7}}
    outs:
    - {path: data/prepared, hash: md5, md5: bb.dir, size: 1, nfiles: 1}
  extract:
    cmd: x
    deps:
    - {path: data/prepared, hash: md5, md5: bb.dir, size: 1, nfiles: 1}
    - {path: data/prepared/one.json, hash: md5, md5: cc, size: 1}
    - {path: stages/prepare.py, hash: md5, md5: dd, size: 1}
    outs: []
"""


def test_what_dvc_wrote_down_is_read_as_outs_code_and_params() -> None:
    lock = read_lock(LOCK)
    assert [(c.stage, c.path, c.md5) for c in lock.code] == [
        ("prepare", "stages/prepare.py", "aa"),
        ("extract", "stages/prepare.py", "dd"),
    ]
    assert lock.params == {"prepare": {"seed": 7}}
    out = lock.out_of("data/prepared/code/rows.parquet")
    assert out is not None and out.md5 == "bb.dir" and out.is_folder
    assert lock.out_of("elsewhere") is None
    with pytest.raises(ValueError, match=r"no dvc\.lock"):
        read_lock(b"stages: [1]")


def test_a_release_without_its_data_says_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    write_draft(tmp_path)
    name = release.promote(tmp_path).name
    store = FolderReleases(tmp_path)
    told = audit(store, [name], tmp_path)[0]
    assert registry_faults(store) == []
    missing = {f.what: f for f in told.findings}
    assert "The manifest of the merged set is nowhere" in missing
    assert "dvc fetch" in missing["The manifest of the merged set is nowhere"].do
    assert told.things["draft"].state == told.things["draft/model.safetensors"].state == "verified"
    assert told.things["merged"].state == "unreachable"


def test_a_changed_byte_of_a_release_is_named_by_the_record_that_knows_better(tmp_path: Path) -> None:
    write_draft(tmp_path)
    name = release.promote(tmp_path).name
    store = FolderReleases(tmp_path)
    before = len(audit(store, [name], tmp_path)[0].findings)
    path = tmp_path / "releases" / name / "draft/model.safetensors"
    path.write_bytes(b"Weights")
    told = audit(store, [name], tmp_path)[0]
    assert len(told.findings) == before + 1 and told.things["draft/model.safetensors"].state == "altered"
    assert told.findings[0].where == f"releases/{name}/draft/model.safetensors"
    path.write_bytes(b"weights")
    (path.parent / "extra.bin").write_bytes(b"x")
    words = [f.what for f in audit(store, [name], tmp_path)[0].findings]
    assert "A release holds a file that its record does not name" in words


def test_a_pointer_or_a_ledger_that_was_edited_is_a_finding_of_the_registry(tmp_path: Path) -> None:
    write_draft(tmp_path, b"one")
    release.promote(tmp_path)
    write_draft(tmp_path, b"two")
    name = release.promote(tmp_path).name
    store = FolderReleases(tmp_path)
    assert registry_faults(store) == []
    ledger, pointer = tmp_path / "releases/ledger.jsonl", tmp_path / "releases/current.json"
    good = ledger.read_text()
    ledger.write_text(good.splitlines()[0] + "\n")
    assert [f.what for f in registry_faults(store)] == [
        "The pointer and the ledger's last entry name different releases"
    ]
    ledger.write_text(good.replace('"draft": "sha256:', '"draft": "sha256:0', 1))
    assert "not in the bytes that it was written in" in registry_faults(store)[0].what, "its seal is another"
    ledger.write_text(good.replace('"action"', ' "action"', 1))
    assert "not in the bytes that it was written in" in registry_faults(store)[0].what
    ledger.write_text(good)
    pointer.write_text(json.dumps({"release": name}))
    assert "not in the bytes that promotion writes" in registry_faults(store)[0].what


def _audit(name: str, rows: tuple[str, ...], licence: str = "MIT", rate: float = 0.1) -> Audit:
    made = Audit(name, draft=f"sha256:{name}", params={"train": {"rate": rate}})
    made.add(Thing("release", "release", name, copies=[GOOD]))
    made.add(Thing("capture", "states", "hidden states", copies=[GOOD]), "release", "names")
    source = Thing("source:talk", "source", "source talk", "sha256:s", [GOOD], {"licence": licence, "rows": "2"})
    made.add(source, "release", "holds")
    for i, row in enumerate(rows):
        made.add(Thing(f"rows:rows_{i}-{i + 1}", "folder", f"row folder {i}", copies=[GOOD]), "capture", "holds")
        made.folders.append(RowFolder(f"rows_{i}-{i + 1}", "talk", i, (row,)))
    return made


def test_the_head_of_a_row_or_a_licence_finds_the_drafts_and_what_cannot_be_told_is_said() -> None:
    told = [_audit("a", ("abc1", "abd2")), _audit("b", ("abd2",), licence="PSF-2.0")]
    assert [(u.release, u.what.split(":")[0]) for u in uses_of_row(told, "abd")] == [
        ("a", "row abd2"),
        ("b", "row abd2"),
    ]
    assert [u.release for u in uses_of_source(told, "PSF-2.0")] == ["b"]
    blind = Audit("c", draft="sha256:c")
    assert [(u.certain, "cannot be told" in u.what) for u in uses_of_source([blind], "talk")] == [(False, True)]
    assert not uses_of_row([blind], "abd")[0].certain
    assert tree.uses([], "row x") == "No draft here was trained on row x."


def test_a_difference_names_parameters_licences_and_rows() -> None:
    found = {c.what: (c.before, c.after) for c in changes(_audit("a", ("x", "y")), _audit("b", ("y", "z"), "BSD", 0.2))}
    assert found["params: train.rate"] == ("0.1", "0.2")
    assert found["source:talk: licence"] == ("MIT", "BSD")
    assert found["rows of talk"] == ("1 gone: x", "1 new: z")
    assert "Nothing differs between a and a" in tree.difference([], "a", "a")


def test_many_folders_are_one_line_of_the_tree_and_one_box_save_those_at_fault() -> None:
    told = _audit("a", tuple(f"row{i}" for i in range(40)))
    for i in range(40):
        told.add(
            Thing(f"states:rows_{i}-{i + 1}", "states of rows", "s", copies=[GOOD]), f"rows:rows_{i}-{i + 1}", "is"
        )
    told.things["states:rows_7-8"].copies.append(Copy("cache", "x", False, "rows 7 to 7"))
    told.blame("altered", "Other bytes", "rows_7-8/rows.safetensors", expected="e", got="g", do="restore it")
    text = tree.tree(told)
    assert "39 more row folders, 39 of them verified to the byte" in text and "✗ is s" in text
    assert (
        "altered: Other bytes\n  where: rows_7-8/rows.safetensors\n  expected: e\n  got: g\n  what to do: restore it"
        in text
    )
    drawn = graph(told)
    assert {b.title: b.state for b in drawn.boxes if "folder" in b.title} == {
        "39 row folders": "verified",
        "row folder 7": "altered",
    }
    assert len(drawn.curves) == 4


def test_the_page_is_self_contained_and_escapes_what_it_shows() -> None:
    told = _audit("a", ("x",))
    told.findings.append(Finding("missing", "<script>alert(1)</script>", "w"))
    told.bonds.append(Bond("release", "nowhere", "?"))
    html = render([told], [])
    assert "<script" not in html and "&lt;script&gt;" in html and "http" not in html
    assert "1 finding, each named below" in html
    assert "No release yet" in render([], [])


def test_a_release_is_chosen_by_the_head_of_its_name_and_the_names_are_told(tmp_path: Path) -> None:
    write_draft(tmp_path)
    name = release.promote(tmp_path).name
    store = FolderReleases(tmp_path)
    assert (
        chosen(store, [name[:4]], False)
        == chosen(store, [], False)
        == chosen(store, [f"releases/{name}/"], False)
        == [name]
    )
    with pytest.raises(LineError, match=f"No such release[\\s\\S]*one of {name}"):
        chosen(store, ["zzz"], False)


def test_remotes_are_read_from_dvcs_own_configuration(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    remote = near\n['remote \"near\"']\n    url = ../store\n")
    found = remotes(tmp_path)
    assert len(found) == 1 and isinstance(found[0], FolderRemote)
    assert found[0].opener("abcdef") is None
    file = tmp_path / ".dvc/../store/files/md5/ab/cdef"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    opened = found[0].opener("abcdef")
    assert opened is not None and opened().read() == b"x"
