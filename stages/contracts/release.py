"""A release: a draft that passed, and where it stands. The ledger alone has times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.contracts.errors import DataError
from stages.contracts.files import Fact

RELEASES = Path("releases")
POINTER = RELEASES / "current.json"
_LIST = "`python -m flows.release list` names the releases; write one of them there"


class ReleaseRecord(Fact):
    """releases/<release digest>/release.json: names everything a deployment has to match, and every other file of the release by
    its digest; releases made before did not name their files."""

    version: Literal[1] = 1
    draft_digest: str
    merged_digest: str
    gate_reports: dict[str, str]
    policy_digest: str
    engine: str
    engine_version: str
    accept_length: float
    accept_length_by_domain: dict[str, float]
    dvc_lock_digest: str
    files: dict[str, str] = Field(default_factory=dict, exclude_if=lambda files: not files)


def current(root: Path = Path()) -> str | None:
    """The name of the current release, or none before the first.

    Raises:
        DataError: the pointer is not what promotion writes.
    """
    path = root / POINTER
    if not path.exists():
        return None
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["release"]
    except (ValueError, KeyError, TypeError):  # bytes that are no UTF-8, no JSON, or JSON of another shape
        name = None
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise DataError(
            "The release pointer cannot be read",
            where=str(path),
            expected='{"release": "<a folder in releases/>"}',
            do=_LIST,
        )
    return name


def current_record(root: Path = Path()) -> ReleaseRecord | None:
    """The record of the current release, or none before the first.

    Raises:
        DataError: the pointer cannot be read, or names a release that is missing or damaged.
    """
    name = current(root)
    if name is None:
        return None
    path = root / RELEASES / name / "release.json"
    if not path.exists():
        raise DataError(
            "The release pointer names a release that is not there",
            where=str(root / POINTER),
            expected=f"{path}, of the release that it names",
            got=f"release {name}, no such file",
            do=_LIST,
        )
    return ReleaseRecord.read(path)
