"""The line's own folders: what their manifests say, and whether what stands on disk is what they say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from stages.contracts.draft import DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError
from stages.contracts.files import Fact, digest
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    MERGED_MANIFEST,
    PREPARED_MANIFEST,
    CaptureManifest,
    CaptureSpec,
    FolderConfig,
    MergedManifest,
    PreparedManifest,
)
from stages.glancing.figures import of_capture, of_merged, of_prepared, of_spec
from stages.glancing.spans import union
from stages.glancing.told import Told, many, some

CONFIG, ROWS = "data_config.json", "rows.safetensors"
_LEFT = re.compile(r"\..+\.\d+\.(part|old)")
_EXTRACT = "`dvc repro extract` puts it right; finished folders are taken from the work cache"


def our_manifest(folder: Path) -> tuple[type[Fact], Path] | None:
    """The manifest of ours that stands in `folder`, by its name and the keys only ours has."""
    named: list[tuple[type[Fact], str, str]] = [
        (PreparedManifest, PREPARED_MANIFEST.name, '"out_of_distribution_digest"'),
        (MergedManifest, MERGED_MANIFEST.name, '"vocabulary_digest"'),
        (DraftRecord, DRAFT_RECORD, ""),
        (CaptureManifest, CAPTURE_MANIFEST.name, '"prepared_digest"'),
        (FolderConfig, CONFIG, '"row_ids"'),
    ]
    for kind, name, key in named:
        path = folder / name
        if path.is_dir() and not key:
            return kind, path
        if path.is_file() and (not key or key.encode() in path.read_bytes()):
            return kind, path
    return None


def tell_ours(folder: Path, kind: type[Fact], path: Path) -> Told:
    """What a folder of ours is.

    Raises:
        DataError: its manifest cannot be read.
    """
    fact = kind.read(path)
    told = Told(str(folder), "", "", {"digest": fact.digest()})
    if isinstance(fact, PreparedManifest):
        _prepared(told, folder, fact)
    elif isinstance(fact, CaptureManifest):
        _captured(told, folder, fact)
    elif isinstance(fact, FolderConfig):
        _folder(told, folder, fact)
    elif isinstance(fact, MergedManifest):
        _merged(told, folder, fact)
    return told


def _prepared(told: Told, folder: Path, fact: PreparedManifest) -> None:
    told.kind, told.what = "prepared", "prepared rows"
    told.facts |= of_prepared(fact)
    told.facts["by_source"] = [
        {
            "source": s.name,
            "domain": s.domain,
            "licence": s.licence,
            "rows": s.rows,
            "held_out": s.held_out_rows,
            "tokens": s.tokens,
            "supervised": s.supervised_tokens,
            "rejects": sum(s.rejects.values()),
        }
        for s in fact.sources
    ]
    _demand(told, folder, [f"{s.name}/rows.parquet" for s in fact.sources], "prepare")
    told.next = ["dvc repro gate-extraction extract"]


def _merged(told: Told, folder: Path, fact: MergedManifest) -> None:
    told.kind, told.what = "merged", "merged rows and states"
    told.facts |= of_merged(fact) | of_spec(fact.capture)
    told.facts |= {"prepared_digest": fact.prepared_digest, "capture_digest": fact.capture_digest}
    _demand(told, folder, ["index.parquet", "vocabulary.safetensors"], "merge")
    _beside(told, folder.parent / "prepared" / PREPARED_MANIFEST.name, PreparedManifest, fact.prepared_digest, "merge")
    _beside(told, folder.parent / "hidden_states" / CONFIG, CaptureManifest, fact.capture_digest, "merge")
    told.next = ["dvc repro gate-training train"]


def _captured(told: Told, folder: Path, fact: CaptureManifest) -> None:
    told.kind, told.what = "hidden_states", "hidden states of this line"
    told.facts |= (
        {"tool": "draftline"} | of_capture(fact) | of_spec(fact.capture) | {"prepared_digest": fact.prepared_digest}
    )
    table: list[dict[str, object]] = []
    for f in fact.folders:
        size, state = _weigh(folder / f.name, f.config_digest)
        table.append(
            {
                "folder": f.name,
                "source": f.source,
                "rows": f.end - f.start,
                "tokens": f.tokens,
                "bytes": size,
                "state": state,
            }
        )
    _tell_states(told, {str(line["folder"]): str(line["state"]) for line in table})
    told.facts["bytes"] = sum(int(str(line["bytes"])) for line in table)
    told.facts["ranges"] = [list(s) for s in union((f.start, f.end) for f in fact.folders)]
    told.facts["by_folder"] = table
    _strangers(told, folder, {f.name for f in fact.folders} | {CONFIG, ".gitignore"})
    _beside(
        told, folder.parent / "prepared" / PREPARED_MANIFEST.name, PreparedManifest, fact.prepared_digest, "extract"
    )
    told.next = ["dvc repro merge gate-training"] if not told.faults else ["dvc repro extract"]
    told.next.append(f"python -m stages.glance {told.path} --verify")


def _tell_states(told: Told, states: dict[str, str]) -> None:
    """A note for each way in which folders are not whole."""
    alike: dict[str, list[str]] = {}
    for name, state in states.items():
        if state != "whole":
            alike.setdefault(state, []).append(name)
    for state, names in alike.items():
        told.add("fault", f"{many(len(names), 'folder')}: {state}", _EXTRACT, some(names))


def _folder(told: Told, folder: Path, fact: FolderConfig) -> None:
    told.kind, told.what = "hidden_states", "folder of hidden states of this line"
    told.facts |= {
        "tool": "draftline",
        "source": fact.source,
        "rows": fact.end - fact.start,
        "tokens": fact.tokens,
        "bytes": fact.bytes,
    }
    told.facts |= of_spec(fact.capture) | {"rows_digest": fact.rows_digest}
    if fact.name != folder.name and folder.name.startswith("rows_"):
        told.add("fault", f"The folder is called {folder.name}, its config says {fact.name}", _EXTRACT)
    _, state = _weigh(folder, None)
    if state != "whole":
        told.add("fault", state, _EXTRACT)
    told.next = [f"python -m stages.glance {told.path} --verify"]


def tell_row_folders(root: Path, names: Sequence[str]) -> Told:
    """Row folders of ours without a manifest over them: a work cache, or a run that did not end."""
    cache = all(not n.rsplit("/", 1)[-1].startswith("rows_") for n in names)
    told = Told(str(root), "hidden_states", "work cache of row folders" if cache else "row folders without a manifest")
    told.facts["tool"] = "draftline"
    specs: dict[str, CaptureSpec] = {}
    table: list[dict[str, object]] = []
    for name in names:
        size, state = _weigh(root / name, None)
        try:
            config = FolderConfig.read(root / name / CONFIG)
        except DataError:
            state = "unreadable config"
            table.append({"folder": name, "source": None, "rows": 0, "tokens": 0, "bytes": size, "state": state})
            continue
        specs[config.capture.key] = config.capture
        line: dict[str, object] = {"folder": name, "source": config.source, "rows": len(config.row_ids)}
        table.append(line | {"tokens": config.tokens, "bytes": size, "state": state})
    for key in ("rows", "tokens", "bytes"):
        told.facts[key] = sum(int(str(line[key])) for line in table)
    _tell_states(told, {str(line["folder"]): str(line["state"]) for line in table})
    told.facts["captured_ways"] = [{"spec": k, **of_spec(s)} for k, s in specs.items()]
    told.facts["by_folder"] = table
    if not cache:
        words = f"No {CONFIG} over the folders: extract writes it last, so it did not end"
        told.add("fault", words, "`dvc repro extract` goes on where it stopped")
        told.next = ["dvc repro extract"]
    return told


def _weigh(folder: Path, config_digest: str | None) -> tuple[int, str]:
    """Bytes of a row folder, and whether they are as many as its config says; contents are for `--verify`."""
    try:
        raw = (folder / CONFIG).read_bytes()
        config = FolderConfig.model_validate_json(raw)
        size = (folder / ROWS).stat().st_size
    except FileNotFoundError as error:
        return 0, f"{Path(str(error.filename)).name if folder.is_dir() else 'the folder'} is missing"
    except (OSError, ValueError) as error:
        return 0, f"its {CONFIG} cannot be read: {str(error).splitlines()[0]}"
    if config_digest and digest(raw) != config_digest:
        return size, f"its {CONFIG} is not the one that the manifest speaks of"
    if size != config.bytes:
        return (
            size,
            f"{size} bytes where its {CONFIG} says {config.bytes}: {'cut off' if size < config.bytes else 'grown'}",
        )
    return size, "whole"


def _demand(told: Told, folder: Path, names: Iterable[str], stage: str) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        told.add("fault", f"Missing: {some(missing)}", f"`dvc repro {stage}`, or `dvc checkout`")
    sizes = [(folder / n).stat().st_size for n in names if n not in missing]
    told.facts["bytes"] = sum(sizes)


def _beside(told: Told, manifest: Path, kind: type[Fact], expected: str, stage: str) -> None:
    """Whether what this was made of is what stands beside it."""
    if not manifest.is_file():
        return
    try:
        got = kind.read(manifest).digest()
    except DataError as error:
        told.add("risk", f"{error.what}: {error.got}", "look at that folder", str(manifest))
        return
    if got != expected:
        words = f"Stale: made of {manifest.parent.name} {expected[:15]}…, and {got[:15]}… stands there now"
        told.add("risk", words, f"`dvc repro {stage}`")


def _strangers(told: Told, folder: Path, known: set[str]) -> None:
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.name not in known)
    left = [n for n in names if _LEFT.fullmatch(n)]
    if left:
        told.add("risk", f"Left by a write that did not end: {some(left)}", "the next `dvc repro extract` sweeps them")
    if others := [n for n in names if n not in left]:
        told.add(
            "risk", f"The manifest does not speak of {some(others)}: rows there are not trained on", "move them away"
        )
