"""A tiny line that really ran up to its draft, recorded by real DVC and git, and promoted: something to audit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flows import release
from stages import extract, merge, train
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.files import write_whole
from stages.contracts.manifest import HIDDEN_STATES, MERGED_MANIFEST, MergedManifest
from stages.contracts.report import evidence_digests, report_path
from tests import line, tiny
from tests.flows.samples import gate_report, git, write_evidence

SOURCES = (line.TinySource("code", "coding", 13), line.TinySource("talk", "general", 7))
GRAPH = """stages:
  prepare:
    cmd: "true"
    deps: [work]
    params: [target, prepare]
    outs: [data/prepared: {persist: true}]
  extract:
    cmd: "true"
    deps: [data/prepared, work]
    params: [target, capture]
    outs: [data/hidden_states: {persist: true}]
  merge:
    cmd: "true"
    deps: [data/prepared, data/hidden_states]
    params: [merge]
    outs: [data/merged: {persist: true}]
  train:
    cmd: "true"
    deps: [data/merged, work, one.py]
    params: [target, train]
    outs: [models/draft: {persist: true}]
"""


def dvc(root: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "dvc", *words], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def begin(root: Path) -> None:
    """A repository with a graph, some code and a tiny target."""
    git(root, "init", "-q")
    dvc(root, "init", "-q")
    dvc(root, "config", "cache.type", "hardlink,copy")
    (root / "dvc.yaml").write_text(GRAPH)
    (root / ".gitignore").write_text("/data/\n/models/\n/releases/\n/.cache/\n/target/\n__pycache__/\n")
    (root / "work/inner").mkdir(parents=True)
    (root / "work/a.py").write_text("print('a')\n")
    (root / "work/inner/b.py").write_text("print('b')\n")
    (root / "one.py").write_text("print('one')\n")
    tiny.make_target(root / "target")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "code")


@contextmanager
def standing_in(root: Path) -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield
    torch.set_num_threads(threads)


def run_line(root: Path, sources: tuple[line.TinySource, ...] = SOURCES, **train_changes: object) -> DraftRecord:
    """Prepare to train, for real; reports as if the draft had been served; all of it committed to DVC's cache."""
    with standing_in(root):
        for folder in ("data", "models", "reports", ".cache"):
            shutil.rmtree(folder, ignore_errors=True)
        steps = {"optimizer_steps": 2, "evaluate_every": 2, "checkpoint_every": 2}
        line.write_params(root, Path("target"), {"train": steps | train_changes})
        prepared = line.write_prepared(root, Path("target"), sources)
        line.write_gate_report(root, "extraction", prepared.digest())
        extract.main()
        merge.main()
        merged = MergedManifest.read(MERGED_MANIFEST).digest()
        line.write_gate_report(root, "training", merged)
        train.main()
        shutil.rmtree(".cache")
        for file in HIDDEN_STATES.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        draft = DraftRecord.read(DRAFT / DRAFT_RECORD)
        write_evidence(root, draft.digest())
        judged = {"evidence": evidence_digests(root)}
        gate_report("deployment", draft.digest()).model_copy(update=judged).write(root / report_path("deployment"))
        write_whole(root / "reports/index.html", b"<!doctype html>")
        dvc(root, "commit", "-fq")
        return draft


def promote(root: Path) -> str:
    return release.promote(root).name


class Changed:
    """A file with one byte changed, put back on leaving; read-only files too."""

    def __init__(self, file: Path, at: int, by: int = 1) -> None:
        self.file, self.at, self.by = file, at, by

    def __enter__(self) -> None:
        self._write()

    def __exit__(self, *_: object) -> None:
        self._write()

    def _write(self) -> None:
        mode = self.file.stat().st_mode
        self.file.chmod(0o644)
        with self.file.open("r+b") as handle:
            handle.seek(self.at)
            byte = handle.read(1)[0]
            handle.seek(self.at)
            handle.write(bytes([byte ^ self.by]))
        self.file.chmod(mode)
