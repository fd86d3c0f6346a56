"""Digests of our own files, taken again: every byte is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from stages.contracts.draft import DraftRecord
from stages.contracts.errors import DataError
from stages.contracts.files import Fact, file_digest
from stages.contracts.manifest import MergedManifest, PreparedManifest, renewal
from stages.glancing.told import Told, many

Advance = Callable[[int], object]


class DamageLike(Protocol):
    """A damaged place of a row store."""

    @property
    def where(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def expected(self) -> str: ...
    @property
    def got(self) -> str: ...
    @property
    def do(self) -> str: ...


def digests_of(fact: Fact) -> Mapping[str, str]:
    """Files that a manifest digests, by name; those of row folders are not here."""
    if isinstance(fact, PreparedManifest):
        rows = {f"{s.name}/rows.parquet": s.rows_digest for s in fact.sources}
        rest = {"out_of_distribution.parquet": fact.out_of_distribution_digest, "rejects.parquet": fact.rejects_digest}
        return rows | rest
    if isinstance(fact, MergedManifest):
        return {"index.parquet": fact.index_digest, "vocabulary.safetensors": fact.vocabulary_digest}
    if isinstance(fact, DraftRecord):
        return {"model.safetensors": fact.weights_digest, "config.json": fact.config_digest}
    return {}


def tell_digests(told: Told, folder: Path, digests: Mapping[str, str], stage: str, advance: Advance) -> None:
    """Compare each file with its digest. stage: the one that writes them."""
    good = 0
    for name, expected in digests.items():
        path = folder / name
        try:
            got = file_digest(path)
        except DataError:
            got = "no such file"
        if got == expected:
            good += 1
        else:
            told.add(
                "fault",
                f"Not the bytes that were written: {expected[:19]}… expected, {got[:19]} found",
                renewal(path, stage),
                name,
            )
        advance(path.stat().st_size if path.is_file() else 0)
    told.facts["verified"] = {"files": len(digests), "as_written": good}
    if good == len(digests):
        told.add("fine", f"{many(good, 'file')} as written")


def tell_damages(told: Told, damages: Iterable[DamageLike], checked: int) -> None:
    """Damaged places of a row store, a merged set or a draft."""
    found = list(damages)
    for d in found:
        told.add("fault", f"{d.what}; expected {d.expected[:19]}, found {d.got[:19]}", d.do, d.where)
    told.facts["verified"] = {"folders": checked, "damaged_places": len(found)}
    if not found:
        told.add("fine", f"{many(checked, 'folder')} as written, to the byte")
