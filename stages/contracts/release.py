"""A release: a draft that passed, where it stands, and who moved which pointer when. Entries alone have times.

A registry (flows/registry) holds releases; releases/ is the working copy of this clone: the releases that it has whole,
current.json, which names the one that production was when this clone last looked, and ledger.jsonl, how it became that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from stages.contracts.errors import DataError
from stages.contracts.files import Fact, canonical, digest

RELEASES = Path("releases")
POINTER = RELEASES / "current.json"
RECORD = "release.json"
Channel = Literal["candidate", "production"]
Name = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]*$")]  # a release's name is a folder's
_NAME_DIGITS = 12
_LIST = "`python -m flows.release list` names the releases; `python -m flows.release follow` writes the pointer anew"


class ReleaseRecord(Fact):
    """releases/<release digest>/release.json: names everything a deployment has to match, and every other file of the
    release by its path there and its digest: the release's name is a digest over them all. Releases from before there were
    registries did not name their files."""

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

    @property
    def name(self) -> str:
        """The release's name: the same draft measured again, or with another policy, is another release."""
        return self.digest().removeprefix("sha256:")[:_NAME_DIGITS]


class ChannelEntry(Fact):
    """One move of a channel's pointer: the pointer itself while it is the last, an entry of the ledger ever after.

    number counts a channel's moves from 1; `previous` is the digest of the entry before (empty for the first), so entries
    make a chain. walk: the releases that rollback walks back through, oldest first, `release` last. withdrawn: drafts
    taken out of service and not brought back since. move: of this one try, so that a writer knows its own. seal: digest
    of all the rest.
    """

    version: Literal[1] = 1
    channel: Channel
    number: Annotated[int, Field(ge=1)]
    action: Literal["promote", "rollback"]
    release: Name
    before: Name | None
    draft: str
    at: str
    by: str
    words: str
    walk: tuple[Name, ...]
    withdrawn: tuple[str, ...]
    previous: str
    move: str
    seal: str

    @model_validator(mode="after")
    def _sealed(self) -> Self:
        if self.seal != _seal(self.model_dump(mode="json")):
            raise ValueError("the seal is that of another entry: a byte of this one was changed")
        if not self.walk or self.walk[-1] != self.release:
            raise ValueError("the walk does not end with the release")
        return self


def sealed(**fields: Any) -> ChannelEntry:
    """An entry with its seal."""
    bare: dict[str, Any] = {"version": 1, **fields}
    bare |= {name: list(bare[name]) for name in ("walk", "withdrawn")}
    return ChannelEntry.model_validate(bare | {"seal": _seal(bare)})


def _seal(fields: dict[str, Any]) -> str:
    return digest(canonical({name: value for name, value in fields.items() if name != "seal"}))


def current(root: Path = Path()) -> str | None:
    """The name of the release that production was when this clone last looked, or none before the first.

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
    path = root / RELEASES / name / RECORD
    if not path.exists():
        raise DataError(
            "The release pointer names a release that is not there",
            where=str(root / POINTER),
            expected=f"{path}, of the release that it names",
            got=f"release {name}, no such file",
            do=_LIST,
        )
    return ReleaseRecord.read(path)
