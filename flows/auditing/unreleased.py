"""The draft that stands in models/ and was never released: it was trained on rows too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from flows.auditing.bytes import Hashed
from flows.auditing.data import walk_data
from flows.auditing.facts import fact_of
from flows.auditing.model import Audit, Thing
from flows.auditing.places import Places
from flows.auditing.walk import Walk
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.provenance import LOCK, read_lock


class Nothing:
    """A store that holds nothing."""

    def names(self) -> list[str]:
        return []

    def files(self, name: str) -> list[str]:
        return []

    def size_bytes(self, name: str) -> int:
        return 0

    def open(self, name: str, file: str) -> BinaryIO:
        raise FileNotFoundError(f"{name}/{file}")

    def where(self, name: str, file: str = "") -> str:
        return f"{name}/{file}"

    def pointers(self) -> dict[str, str]:
        return {}

    def history(self) -> list[dict[str, Any]]:
        return []


def unreleased(root: Path, released: Iterable[Audit]) -> Audit | None:
    """What models/draft was trained on, by its own record and the workspace's dvc.lock; nothing when there is no draft, or
    when it is one of those released."""
    path, lock = root / DRAFT / DRAFT_RECORD, root / LOCK
    data = path.read_bytes() if path.is_file() else b""
    draft = fact_of(DraftRecord, data)
    if draft is None or draft.digest() in {audit.draft for audit in released}:
        return None
    try:
        told = read_lock(lock.read_bytes() if lock.is_file() else b"")
    except ValueError:
        told = None
    walk = Walk(Nothing(), f"{DRAFT} (not released)", root, Hashed(), hash_all=False)
    walk.audit.draft = draft.digest()
    walk.audit.add(Thing("draft", "draft", f"draft of {draft.target.name}", draft.digest()))
    walk_data(walk, Places(root, told, [], walk.hashed), draft)
    return walk.audit
