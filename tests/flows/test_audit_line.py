"""The audit over a tiny line that really ran twice: what is sound, what a changed byte is called, what was trained on what."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing

from flows.audit import audit
from flows.auditing.lineage import write_events
from flows.auditing.model import Audit, Finding
from flows.auditing.page import render
from flows.auditing.registered import store_faults
from flows.auditing.releases import FolderReleases
from flows.auditing.standing import registry_faults
from flows.registry.store import open_store
from stages.contracts.files import canonical
from stages.contracts.params import load_params
from tests.corpus.test_places import bucket
from tests.flows import audited
from tests.flows.audited import Changed
from tests.flows.samples import git

__all__ = ["bucket"]
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Line:
    root: Path
    old: str
    new: str

    @property
    def store(self) -> FolderReleases:
        return FolderReleases(self.root)

    def audits(self) -> list[Audit]:
        return audit(self.store, [self.old, self.new], self.root)

    def findings(self) -> list[Finding]:
        registry = open_store(load_params(self.root / "params.yaml").registry, self.root)
        return [*registry_faults(self.store), *store_faults(registry), *(f for a in self.audits() for f in a.findings)]

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-m", "flows.audit", *words]
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """Two releases: the second has another source and other parameters, and data/ holds only what it was made of."""
    root = tmp_path_factory.mktemp("line")
    audited.begin(root)
    audited.run_line(root)
    old = audited.promote(root)
    more = (audited.SOURCES[0], audited.line.TinySource("tools", "agentic", 8))
    audited.run_line(root, more, learning_rate=0.002)
    return Line(root, old, audited.promote(root))


@pytest.fixture
def copy(line: Line, tmp_path: Path) -> Line:
    """The line in a folder that a test may break; links to the cache are copies there."""
    shutil.copytree(line.root, tmp_path / "line", symlinks=True)
    return Line(tmp_path / "line", line.old, line.new)


def test_both_releases_are_sound_and_the_older_one_is_read_from_dvcs_cache(line: Line) -> None:
    old, new = line.audits()
    assert line.findings() == []
    assert {t.state for a in (old, new) for t in a.things.values()} == {"verified"}
    assert old.things["source:talk"].places == "cache" and new.things["source:tools"].places == "cache, workspace"
    assert old.things["rows:rows_0-6"].places == "cache, release"
    assert re.fullmatch(r"code of commit [0-9a-f]{12}", new.things["code"].title)
    assert new.things["code"].places == "git" and new.things["target"].places == "target"


def _places(line: Line) -> dict[str, list[Path]]:
    """Files by what they are, in every place that the audit reads."""
    root, cache = line.root, line.root / ".dvc/cache/files/md5"
    kinds: dict[str, list[Path]] = {}
    for folder in ("releases", "data", "models", "target"):
        for file in sorted((root / folder).rglob("*")):
            if (
                file.is_file()
                and file.stat().st_size
                and file.name not in (".lock", ".gitignore", "config.json", "tokenizer_config.json")
            ):
                within = file.relative_to(root / folder).parts
                name = f"{within[0]}/{within[1]}" if within[0] == ".registry" else file.name
                kinds.setdefault(f"{folder}/{name}", []).append(file)
    kinds["cache"] = [p for p in sorted(cache.rglob("*")) if p.is_file() and p.suffix != ".dir"]
    kinds["listing"] = [p for p in sorted(cache.rglob("*.dir")) if p.stat().st_size]
    return kinds


def test_a_byte_changed_anywhere_is_found_and_its_file_named(copy: Line) -> None:
    assert copy.findings() == []
    chance, kinds = random.Random(7), _places(copy)
    assert len(kinds) > 20
    unseen: list[str] = []
    for turn in range(4):
        for kind, files in kinds.items():
            file = chance.choice(files)
            at = chance.randrange(file.stat().st_size)
            with Changed(file, at, 1 << chance.randrange(8)):
                found = copy.findings()
            named = [f for f in found if str(file.relative_to(copy.root)) in f.where or file.name in f.where]
            named += [f for f in found if kind == "releases/current.json" and "pointer" in f.what]
            named += [f for f in found if kind == "releases/ledger.jsonl" and ("ledger" in f.what + f.where)]
            named += [f for f in found if kind.startswith("target/") and f.where.endswith("/target")]
            if not named or not all(f.do for f in found):
                unseen.append(f"{turn} {file} byte {at}: {found}")
    assert unseen == []
    assert copy.findings() == []


def test_a_record_forged_with_care_is_found_by_what_names_it(copy: Line) -> None:
    """Canonical bytes, valid fields: only the digest above tells."""
    forgeries = {
        f"releases/{copy.new}/release.json": ("accept_length", 1.9),
        f"releases/{copy.new}/draft/draft_record.json": ("steps_ahead", 4),
        f"releases/{copy.new}/gates/training.json": ("subject", "other rows"),
        f"releases/{copy.new}/evidence/serve_validate.json": ("draft_steps", 4),
        f"releases/{copy.new}/provenance/prepared.json": ("seed", 8),
        f"releases/{copy.new}/provenance/merged.json": ("rows", 19),
        "data/hidden_states/data_config.json": ("rows", 1),
    }
    for name, (key, value) in forgeries.items():
        path = copy.root / name
        before = path.read_bytes()
        path.write_bytes(canonical(json.loads(before) | {key: value}))
        found = [f for f in copy.findings() if name in f.where]
        path.write_bytes(before)
        assert found and found[0].fault == "altered" and found[0].expected != found[0].got, name
    assert copy.findings() == []


def test_what_is_gone_is_unreachable_or_missing_and_never_called_altered(copy: Line) -> None:
    shutil.rmtree(copy.root / ".dvc/cache")
    shutil.rmtree(copy.root / "data")
    old, new = copy.audits()
    for told in (old, new):
        assert told.count("altered") == 0
        assert told.things["states:rows_0-6"].state == "unreachable"
        assert told.things["rows:rows_0-6"].state == told.things["prepared"].state == "verified"
        assert {f.fault for f in told.findings} == {"unreproducible"}
        assert all("prepared rows of" in f.what and "dvc fetch" in f.do for f in told.findings)
    assert sum(len(f.row_ids) for f in old.folders) == 20, "the release itself still says which rows they were"
    (copy.root / "releases" / copy.new / "gates/training.json").unlink()
    gone = [f for f in copy.findings() if f.fault == "missing"]
    assert [f.where for f in gone] == [f"releases/{copy.new}/gates/training.json"]


def test_a_remote_is_read_where_nothing_nearer_is_and_its_bytes_are_hashed_too(copy: Line, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    shutil.move(copy.root / ".dvc/cache", remote)
    (copy.root / ".dvc/config.local").write_text(f"['remote \"far\"']\n    url = {remote}\n")
    old, new = copy.audits()
    assert old.sound and new.sound
    assert old.things["states:rows_0-6"].places == "remote" and new.things["states:rows_0-6"].places == "workspace"
    md5 = next(p for p in sorted((remote / "files/md5").rglob("*")) if p.is_file() and p.stat().st_size > 100_000)
    with Changed(md5, 5000):
        found = copy.findings()
    assert not found or all("remote" in f.where for f in found)
    shutil.rmtree(copy.root / "data")
    shutil.rmtree(copy.root / "models")
    with Changed(md5, 5000):
        assert [f for f in copy.findings() if md5.name in f.where and "(remote)" in f.where]


def test_a_bucket_is_read_as_a_folder_is(copy: Line, bucket: Any) -> None:
    """SeaweedFS's own S3."""
    for file in (copy.root / ".dvc/cache/files").rglob("*"):
        if file.is_file():
            key = f"store/{file.relative_to(copy.root / '.dvc/cache')}"
            bucket.put_object(Bucket="rows", Key=key, Body=file.read_bytes())
    shutil.rmtree(copy.root / ".dvc/cache")
    (copy.root / ".dvc/config.local").write_text("['remote \"far\"']\n    url = s3://rows/store\n")
    old, new = copy.audits()
    assert (old.findings, new.findings) == ([], [])
    assert old.things["states:rows_0-6"].places == old.things["source:talk"].places == "remote"
    listed = bucket.list_objects_v2(Bucket="rows", Prefix="store/")["Contents"]
    key = max(listed, key=lambda entry: entry["Size"])["Key"]
    body = bytearray(bucket.get_object(Bucket="rows", Key=key)["Body"].read())
    body[len(body) // 2] ^= 4
    bucket.put_object(Bucket="rows", Key=key, Body=bytes(body))
    shutil.rmtree(copy.root / "data")
    assert {f.where for f in copy.findings()} <= {f"s3://rows/{key} (remote)"}
    bucket.delete_object(Bucket="rows", Key=key)
    assert all(f.fault == "unreproducible" for f in copy.findings())


def test_a_draft_that_was_never_released_is_found_too(copy: Line) -> None:
    row = next(f for f in copy.audits()[1].folders if f.source == "tools").row_ids[0]
    for gone in (copy.new, ".registry"):
        shutil.rmtree(copy.root / "releases" / gone)
    (copy.root / "releases/ledger.jsonl").unlink()
    told = copy.cli("--source", "tools").stdout
    assert told.startswith("models/draft (not released)  draft sha256:") and "source tools: 8 (" in told
    assert "models/draft (not released)" in copy.cli("--row", row).stdout


def test_code_that_no_commit_holds_makes_a_release_unreproducible(copy: Line) -> None:
    (copy.root / "work/a.py").write_text("print('not committed')\n")
    audited.run_line(copy.root, learning_rate=0.003)
    name = audited.promote(copy.root)
    found = audit(copy.store, [name], copy.root)[0].findings
    assert {f.fault for f in found} == {"unreproducible"}
    assert sorted(f.what for f in found) == [
        f"No commit holds the code that {s} ran" for s in ("extract", "prepare", "train")
    ]
    assert all("these differ: work" in f.got and "commit before a run" in f.do for f in found)
    git(copy.root, "commit", "-qam", "after all")
    assert audit(copy.store, [name], copy.root)[0].findings == []


def test_sources_and_rows_lead_to_the_drafts_that_were_trained_on_them(line: Line) -> None:
    old, new = line.audits()
    row = next(f for f in old.folders if f.source == "talk").row_ids[3]
    told = line.cli("--source", "talk")
    assert told.returncode == 0 and told.stdout.startswith(
        f"{line.old}  draft {old.draft}  source talk: 7 (6 trained on"
    )
    assert line.new not in told.stdout
    both = line.cli("--source", "code").stdout
    assert line.old in both and line.new in both
    assert line.cli("--source", "MIT").stdout.count("draft sha256:") == 4
    found = line.cli("--row", row[:10]).stdout
    assert found == f"{line.old}  draft {old.draft}  row {row}: rows_13-19, row 16 of source talk\n"
    assert line.cli("--row", "f" * 24).stdout == f"No draft here was trained on {'f' * 24}.\n"
    assert json.loads(line.cli("--row", row, "--json").stdout)[0]["release"] == line.old
    assert new.draft not in found


def test_what_changed_between_two_releases_is_told(line: Line) -> None:
    told = line.cli(line.old, line.new[:6]).stdout
    assert "params: train.learning_rate\n  - 0.0015\n  + 0.002" in told
    assert "source:tools\n  - (nothing)\n  + source tools" in told
    assert re.search(r"rows of talk\n  - 7 gone: [0-9a-f]{24}, .*\n  \+ 0 new", told)
    assert "rows of code" not in told and "target" not in told and "code: " not in told


def test_the_exit_code_says_whether_anything_is_wrong(copy: Line) -> None:
    done = copy.cli("--all")
    assert done.returncode == 0 and done.stdout.count("sound") == 2, done.stderr
    with Changed(copy.root / f"releases/{copy.new}/draft/model.safetensors", 999):
        done = copy.cli()
    assert done.returncode == 1
    assert (
        f"altered: draft/model.safetensors of the release is not what draft names\n  where: releases/{copy.new}"
        in done.stdout
    )
    assert "✗ is draft/model.safetensors" in done.stdout
    (copy.root / "releases/current.json").write_bytes(canonical({"release": "0" * 12}))
    done = copy.cli()
    assert done.returncode == 1 and "The pointer `current` names a release that is not there" in done.stdout
    assert copy.cli("nonsense").returncode == 2


def _registry() -> tuple[dict[str, Any], referencing.Registry]:
    told = {
        d["$id"]: d for d in (json.loads(p.read_text()) for p in (Path(__file__).parent / "openlineage").glob("*.json"))
    }
    resources = [(name, referencing.Resource.from_contents(d)) for name, d in told.items()]
    return told, referencing.Registry().with_resources(resources)


def _facets(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from event["run"].get("facets", {}).values()
    yield from event["job"]["facets"].values()
    for dataset in [*event["inputs"], *event["outputs"]]:
        yield from dataset["facets"].values()
        yield from dataset.get("inputFacets", {}).values()


def test_openlineage_events_are_valid_by_its_own_schemas_and_name_every_source(line: Line, tmp_path: Path) -> None:
    write_events(tmp_path / "events.jsonl", line.audits(), line.store)
    found = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    schemas, registry = _registry()
    core = next(d for name, d in schemas.items() if name.endswith("OpenLineage.json"))
    for event in found:
        jsonschema.Draft202012Validator(core, registry=registry).validate(event)
        for facet in _facets(event):
            schema = {"$ref": facet["_schemaURL"]}
            jsonschema.Draft202012Validator(schema, registry=registry).validate(facet)
    assert len({e["run"]["runId"] for e in found}) == 20 and len(found) == 40
    done = [e for e in found if e["eventType"] == "COMPLETE"]
    written = {d["name"] for e in done for d in e["outputs"]}
    assert {"prepared/talk", "prepared/tools", "prepared", "capture", "merged", "draft", "release"} <= written
    judged = next(e for e in done if e["job"]["name"] == "gate-deployment")["inputs"][0]["inputFacets"]
    assert judged["dataQualityAssertions"]["assertions"][0]["assertion"] == "nearest point is the claimed one"
    write_events(tmp_path / "again.jsonl", line.audits(), line.store)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "events.jsonl").read_bytes()


def test_chromium_shows_the_page_with_its_graph_and_nothing_from_outside(copy: Line, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail("chromium is not installed; `apt-get install chromium`, as .ci/run does")
    with Changed(copy.root / f"releases/{copy.new}/draft/model.safetensors", 999):
        html = render(copy.audits(), registry_faults(copy.store))
    assert "<script" not in html and "http" not in html
    probe = (
        "<script>onload = () => { document.title = [document.documentElement.scrollWidth, innerWidth, "
        "performance.getEntriesByType('resource').length, document.querySelectorAll('.box.altered rect').length, "
        "document.querySelectorAll('.box').length].join('/') }</script></body>"
    )
    page = tmp_path / "page.html"
    page.write_text(html.replace("</body>", probe))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--window-size=500,900", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND"]
    done = subprocess.run([chromium, *flags, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r"<title>(\d+)/(\d+)/(\d+)/(\d+)/(\d+)</title>", done.stdout)
    assert found and int(found[1]) <= int(found[2]), "the page is wider than the screen"
    assert int(found[3]) == 0, "the page loads something beside itself"
    assert int(found[5]) > 20
    assert "Something is wrong" in done.stdout and "draft/model.safetensors of the release" in done.stdout
