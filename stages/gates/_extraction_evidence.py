"""What gate-extraction looks at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stages.contracts.manifest import PreparedManifest, TargetIdentity
from stages.contracts.quality import AcceptedDataset, PreparedQuality

if TYPE_CHECKING:
    from pandas import DataFrame

AGAIN = "run `dvc repro prepare`"


class Frames(Protocol):
    """Rows as frames, one after the other; read anew each time."""

    def read(self, columns: Sequence[str] | None = None) -> Iterator[DataFrame]: ...


@dataclass(frozen=True)
class Evidence:
    """What the gate looks at.

    Args:
        manifest: data/prepared/prepared.json.
        rows: of every rows.parquet of the sources, one below the other: a frame, or frames.
        files: file, recorded, found: digests of the files that the manifest names.
        target: the target on this disk.
        template_prefix: token ids with which the target's template opens any conversation.
        bos_id: the tokenizer's beginning-of-sequence id, when it has one.
        quality: data/prepared/quality.json.
        earlier: the rows accepted before these; None before the first.
    """

    manifest: PreparedManifest
    rows: DataFrame | Frames
    files: DataFrame
    target: TargetIdentity
    template_prefix: tuple[int, ...]
    bos_id: int | None
    quality: PreparedQuality
    earlier: AcceptedDataset | None = None
