"""Facts from bytes that may lie anywhere."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from stages.contracts.files import Fact
from stages.contracts.release import ReleaseRecord

FactT = TypeVar("FactT", bound=Fact)


def fact_of(kind: type[FactT], data: bytes | None) -> FactT | None:
    """A fact from its own bytes; nothing when they are not those that such a fact is written in."""
    try:
        fact = kind.model_validate_json(data or b"")
    except ValidationError:
        return None
    return fact if fact.canonical() == data else None


def files_of(record: ReleaseRecord) -> dict[str, str]:
    """Every file that a release's record names, and its digest; a record may tell the size beside it."""
    told: dict[str, Any] = dict(record.files)
    return {name: str(getattr(file, "sha256", file)) for name, file in told.items()}
