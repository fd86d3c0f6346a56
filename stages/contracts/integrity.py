"""Are the files of the merged set and of the draft those that their own records digest? The store has its own check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stages.contracts.damage import Damage
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError
from stages.contracts.evidence import TRAIN_METRICS, TrainMetrics
from stages.contracts.files import file_digest
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    MERGED,
    MERGED_MANIFEST,
    CaptureManifest,
    MergedManifest,
    renewal,
)
from stages.contracts.report import GateReport, report_path

_TRAIN = "run `dvc repro -f -s train`; every step that is left is taken again"


def verify_merged(root: Path = Path()) -> list[Damage]:
    """data/merged below `root`: both files and the store's manifest against its own, and that against gate-training's report."""
    try:
        merged = MergedManifest.read(root / MERGED_MANIFEST)
    except DataError as error:
        return [_unread(MERGED_MANIFEST, error, renewal(MERGED_MANIFEST, "merge"))]
    pairs = [("index.parquet", merged.index_digest), ("vocabulary.safetensors", merged.vocabulary_digest)]
    damages = _files(root, MERGED, pairs, lambda path: renewal(path, "merge"))
    return damages + _captured(root, merged.capture_digest) + _judged(root, MERGED_MANIFEST, merged.digest())


def _captured(root: Path, expected: str) -> list[Damage]:
    if not (root / CAPTURE_MANIFEST).exists():
        return []
    do = "run `dvc repro -f -s extract`, then `dvc repro`"
    try:
        got = CaptureManifest.read(root / CAPTURE_MANIFEST).digest()
    except DataError as error:
        return [_unread(CAPTURE_MANIFEST, error, do)]
    what = "The manifest of the hidden states is not the one that was merged"
    return [] if got == expected else [Damage(str(CAPTURE_MANIFEST), what, expected, got, do)]


def _judged(root: Path, path: Path, digest: str) -> list[Damage]:
    report = report_path("training")
    if not (root / report).exists():
        return []
    judged = GateReport.read(root / report).subject_digest
    if judged == digest:
        return []
    what = "The manifest is not the one that gate-training judged"
    return [Damage(str(path), what, judged, digest, "run `dvc repro gate-training`, or " + renewal(path, "merge"))]


def verify_draft(root: Path = Path()) -> list[Damage]:
    """models/draft below `root`: both files against the record, the record against what training wrote beside it."""
    path = DRAFT / DRAFT_RECORD
    try:
        record = DraftRecord.read(root / path)
    except DataError as error:
        return [_unread(path, error, _TRAIN)]
    pairs = [("model.safetensors", record.weights_digest), ("config.json", record.config_digest)]
    damages = _files(root, DRAFT, pairs, lambda _: _TRAIN)
    if (root / TRAIN_METRICS).exists():
        told = TrainMetrics.read(root / TRAIN_METRICS).draft_digest
        if told != record.digest():
            what = f"The record is not the one that {TRAIN_METRICS} speaks of"
            damages.append(Damage(str(path), what, told, record.digest(), _TRAIN))
    return damages


def _files(root: Path, folder: Path, pairs: Sequence[tuple[str, str]], do: Callable[[Path], str]) -> list[Damage]:
    """Damage of each file of `folder` whose digest is another than the recorded one."""
    damages: list[Damage] = []
    for name, expected in pairs:
        path = folder / name
        got = file_digest(root / path) if (root / path).is_file() else "no such file"
        if got != expected:
            damages.append(Damage(str(path), "A file is not the one that was written", expected, got, do(path)))
    return damages


def _unread(path: Path, error: DataError, do: str) -> Damage:
    return Damage(str(path), error.what, error.expected, error.got, do)
