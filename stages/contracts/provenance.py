"""What a release keeps of the line that made it, so that it can be audited after data/ has moved on to a newer run.

Only what the draft's own chain of digests names is kept: manifests and the row folders' configs, which name every row;
never the rows and states themselves, which DVC's cache and remotes hold under the hashes in dvc.lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stages.contracts.draft import DraftRecord
from stages.contracts.files import Fact, digest
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    HIDDEN_STATES,
    MERGED_MANIFEST,
    PREPARED_MANIFEST,
    MergedManifest,
)

LOCK = Path("dvc.lock")
PROVENANCE = "provenance"
KEPT_LOCK = f"{PROVENANCE}/dvc.lock"
KEPT_MERGED = f"{PROVENANCE}/merged.json"
KEPT_CAPTURE = f"{PROVENANCE}/hidden_states.json"
KEPT_PREPARED = f"{PROVENANCE}/prepared.json"
FOLDER_CONFIG = "data_config.json"


def kept_folder(name: str) -> str:
    """Where a release keeps the config of a row folder, which names its rows."""
    return f"{PROVENANCE}/rows/{name}.json"


def kept_files(root: Path, draft: DraftRecord) -> dict[str, Path]:
    """Name in the release and file below `root`, of all that `draft` stands on; what is not there, or is of another run,
    is left out, and the audit says so."""
    found: dict[str, Path] = {}
    if (root / LOCK).is_file():
        found[KEPT_LOCK] = root / LOCK
    merged = _read(root / MERGED_MANIFEST, draft.merged_digest)
    if merged is None:
        return found
    found[KEPT_MERGED] = root / MERGED_MANIFEST
    told = MergedManifest.model_validate_json(merged)
    named = [
        (KEPT_CAPTURE, CAPTURE_MANIFEST, told.capture_digest),
        (KEPT_PREPARED, PREPARED_MANIFEST, told.prepared_digest),
    ]
    named += [(kept_folder(f.name), HIDDEN_STATES / f.name / FOLDER_CONFIG, f.config_digest) for f in told.folders]
    return found | {kept: root / path for kept, path, expected in named if _read(root / path, expected) is not None}


def _read(path: Path, expected: str) -> bytes | None:
    data = path.read_bytes() if path.is_file() else b""
    return data if digest(data) == expected else None


class LockedPath(Fact):
    """A file or folder of dvc.lock, by DVC's own hash (md5 of the bytes; of a folder, of its listing)."""

    stage: str
    path: str
    md5: str

    @property
    def is_folder(self) -> bool:
        return self.md5.endswith(".dir")


class Lock(Fact):
    """dvc.lock, as far as it names bytes and parameters: outs by path, the code of each stage, params by section."""

    outs: dict[str, LockedPath]
    code: tuple[LockedPath, ...]
    params: dict[str, Any]

    def out_of(self, path: str) -> LockedPath | None:
        """The out that a file below the repository's root belongs to."""
        parents = (str(p) for p in (Path(path), *Path(path).parents))
        return next((self.outs[p] for p in parents if p in self.outs), None)


def read_lock(text: bytes) -> Lock:
    """Raises: ValueError: no dvc.lock."""
    try:
        stages: dict[str, Any] = yaml.safe_load(text)["stages"]
        outs = {p.path: p for p in _paths(stages, "outs")}
        code = tuple(p for p in _paths(stages, "deps") if p.path not in outs and not _below(p.path, outs))
        params: dict[str, Any] = {}
        for stage in stages.values():
            params |= stage.get("params", {}).get("params.yaml", {})
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no dvc.lock: {error}") from error
    return Lock(outs=outs, code=code, params=params)


def _paths(stages: dict[str, Any], kind: str) -> Iterator[LockedPath]:
    for name, stage in stages.items():
        for told in stage.get(kind, []):
            if "md5" in told:
                yield LockedPath(stage=name, path=told["path"], md5=told["md5"])


def _below(path: str, outs: dict[str, LockedPath]) -> bool:
    return any(str(p) in outs for p in Path(path).parents)
