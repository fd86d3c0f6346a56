"""Which rows a deep look opens, and what it found, as notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from stages.glancing.folders import File
from stages.glancing.told import Told

MOST_FILES = 48
MOST_NEIGHBOURS = 2000
_NAMED = 8  # findings of one kind that are told one by one
FileT = TypeVar("FileT", bound=File)


class FindingLike(Protocol):
    """One finding of the value checks."""

    @property
    def kind(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def expected(self) -> str: ...
    @property
    def found(self) -> str: ...
    @property
    def do(self) -> str: ...
    @property
    def note(self) -> bool: ...


def choose(files: Sequence[FileT], most: int = MOST_FILES) -> list[FileT]:
    """A sample of the files: of every folder the smallest and the largest as far as that goes, others evenly spaced."""
    if len(files) <= most:
        return list(files)
    by_folder: dict[str, list[FileT]] = {}
    for file in files:
        by_folder.setdefault(file.folder, []).append(file)
    ends = [pick(inside, key=lambda f: f.bytes) for inside in by_folder.values() for pick in (min, max)]
    chosen = {id(f) for f in ends[:: -(-len(ends) * 2 // most)]}
    for i in range(most):
        if len(chosen) < most:
            chosen.add(id(files[i * len(files) // most]))
    return [f for f in files if id(f) in chosen]


def neighbours(files: Sequence[FileT], chosen: Sequence[FileT], most: int = MOST_NEIGHBOURS) -> list[FileT]:
    """The rest of the first chosen file's folder, of which tokens and masks are looked at: masks that are out of order show
    only beside one another. Compressed files have no cheap look."""
    taken = {id(f) for f in chosen}
    folder = chosen[0].folder if chosen else ""
    rest = [f for f in files if f.folder == folder and id(f) not in taken and not f.name.endswith(".gz")]
    return rest[:most]


def tell_findings(told: Told, findings: Iterable[FindingLike], opened: int, all_files: int) -> None:
    """Add what was found; the first few of a kind by file, the rest counted."""
    by_kind: dict[str, list[FindingLike]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    told.facts["deep"] = {"files_opened": opened, "files": all_files, "kinds": {k: len(v) for k, v in by_kind.items()}}
    for found in by_kind.values():
        for f in found[:_NAMED]:
            parts = [f.what, f"expected {f.expected}" if f.expected else "", f"found {f.found}" if f.found else ""]
            told.add("fine" if f.note else "fault", "; ".join(p for p in parts if p), f.do, f.file)
        if len(found) > _NAMED:
            told.add("fault", f"{found[0].what}: {len(found) - _NAMED} more", found[0].do)
    if opened < all_files:
        told.add("note", f"Values were looked at in {opened} of {all_files} files")
