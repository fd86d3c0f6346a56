"""The whole graph through DVC, on a tiny random target: it runs, it rests, it refuses damaged data, it mends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import SERVE_EVIDENCE, ServeEvidence, ServingPolicy
from stages.contracts.manifest import CAPTURE_MANIFEST, HIDDEN_STATES, MERGED_MANIFEST, CaptureManifest, MergedManifest
from stages.contracts.report import GateReport, demand, report_path
from tests import tiny
from tests.line import write_params

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
_VERBS = ("sort", "name", "count", "explain", "write", "list", "check", "translate")
_THINGS = ("files", "numbers", "words", "towns", "tools", "rivers", "colours")
_SOURCES = (("code", "coding"), ("tools", "agentic"), ("talk", "general"))


@dataclass
class Clone:
    """A clone of this repository with a tiny target, in a folder of its own."""

    root: Path

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *words], cwd=self.root, env=env, capture_output=True, text=True, timeout=500
        )

    def dvc(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "dvc", *words)

    def stages(self) -> list[str]:
        return self.dvc("stage", "list", "--name-only").stdout.split()

    def repro(self) -> subprocess.CompletedProcess[str]:
        return self.dvc("repro")

    def bytes_of(self, *folders: Path) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for f in folders for p in sorted((self.root / f).rglob("*")) if p.is_file()}


def _write_sources(root: Path) -> list[dict[str, Any]]:
    """Three JSONL files of short prompts, no two alike."""
    sources: list[dict[str, Any]] = []
    for s, (name, domain) in enumerate(_SOURCES):
        texts = [f"{verb} {len(thing) + s} {thing} for {name}" for verb in _VERBS for thing in _THINGS][s::3]
        lines = [
            json.dumps({"id": f"{name}-{i}", "messages": [{"role": "user", "content": t}]}) for i, t in enumerate(texts)
        ]
        path = root / "prompts" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        shape = {"kind": "jsonl", "licence": "MIT", "answers": "regenerate", "limit": 16}
        sources.append({"name": name, "domain": domain, "path": f"prompts/{name}.jsonl", **shape})
    return sources


def _make_target(folder: Path) -> None:
    """The tiny target with a final norm that matters: with weights near 1, as at the start of training, a state read with
    or without its norm gives the same greedy token, and nothing could tell the two readings apart."""
    tiny.make_target(folder)
    tensors = load_file(folder / "model.safetensors")
    weight = torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(5))
    save_file(tensors | {"model.norm.weight": 2 * weight}, folder / "model.safetensors", metadata={"format": "pt"})


def _write_params(root: Path) -> None:
    """The shipped parameters cut down: thresholds that judge a random target's wit are open, those of soundness stay."""
    changes: dict[str, dict[str, Any]] = {
        "prepare": {
            "sources": _write_sources(root),
            "held_out_share": 0.25,
            "max_new_tokens": 24,
            "repetitive": "keep",
            "out_of_distribution": 4,
        },
        "serve": {
            "prompts_per_source": 3,
            "max_new_tokens": 16,
            "concurrency": 4,
            "sampling_prompts": 0,
            "parity_rows": 3,
        },
        "benchmark": {
            "concurrencies": [1, 2],
            "draft_steps": [1, 3],
            "requests": 2,
            "max_new_tokens": 12,
            "out_of_distribution_prompts": 3,
        },
    }
    path = write_params(root, root / "target", changes)
    params = json.loads(path.read_text())
    params["target"]["origin"] = "target"
    params["gates"]["extraction"] |= {
        "min_rows": 20,
        "min_held_out_rows": 3,
        "max_reject_share": 0.5,
        "max_capped_share": 1.0,
        "max_repetitive_share": 1.0,
        "min_supervised_tokens": 100,
    }
    params["gates"]["training"] |= {"probe_rows": 3, "min_argmax_agreement": 0.5}
    params["gates"]["deployment"] |= {
        "min_accept_length": 1.0,
        "min_domain_accept_length": {"coding": 1.0},
        "min_policy_throughput_ratio": 0.1,
        "max_accept_length_loss": 9.0,
    }
    path.write_text(json.dumps(params, indent=1))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """The tracked files, a tiny target and its params, and one whole `dvc repro`."""
    root = tmp_path_factory.mktemp("clone")
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, told.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    (root / "dvc.lock").unlink(missing_ok=True)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a clone"]):
        subprocess.run([*git, *words], cwd=root, check=True, capture_output=True)
    _make_target(root / "target")
    _write_params(root)
    it = Clone(root)
    done = it.repro()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return it


def test_every_output_is_there_and_names_what_it_was_made_of(clone: Clone) -> None:
    root = clone.root
    capture = CaptureManifest.read(root / CAPTURE_MANIFEST)
    merged = MergedManifest.read(root / MERGED_MANIFEST)
    draft = DraftRecord.read(root / DRAFT / DRAFT_RECORD)
    assert merged.capture_digest == capture.digest() and merged.prepared_digest == capture.prepared_digest
    assert draft.merged_digest == merged.digest() and draft.points == tiny.POINTS
    assert draft.gate_training_digest == GateReport.read(root / report_path("training")).digest()
    assert demand("deployment", draft.digest(), root).success
    served = ServeEvidence.read(root / SERVE_EVIDENCE)
    assert served.draft_digest == draft.digest() == ServingPolicy.read(root / "reports/policy.json").draft_digest
    assert set(served.served_by_domain) == {domain for _, domain in _SOURCES}
    assert (root / "reports/index.html").stat().st_size > 10_000


def test_no_fact_has_this_machine_or_a_clock_in_it(clone: Clone) -> None:
    for path in [
        *clone.root.glob("reports/**/*.json"),
        *clone.root.glob("data/**/*.json"),
        *clone.root.glob("models/**/*.json"),
    ]:
        text = path.read_text()
        assert str(clone.root) not in text and os.uname().nodename not in text, path
        assert not re.search(r"20\d\d-\d\d-\d\dT", text), path


def test_a_second_run_does_nothing(clone: Clone) -> None:
    lock = (clone.root / "dvc.lock").read_bytes()
    done = clone.repro()
    assert done.returncode == 0 and done.stdout.count("didn't change, skipping") == len(clone.stages())
    assert "Running stage" not in done.stdout
    assert (clone.root / "dvc.lock").read_bytes() == lock


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["dag"], "gate-deployment"),
        (["params", "diff"], "train.optimizer_steps"),
        (["metrics", "show"], "reports/serve_validate.json"),
        (["plots", "show", "-o", "plots"], "index.html"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_dvcs_own_views_work_on_it(clone: Clone, words: list[str], told: str) -> None:
    done = clone.dvc(*words)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_what_passed_is_promoted_from_the_command_line(clone: Clone) -> None:
    done = clone.python("-m", "flows.release", "promote")
    assert done.returncode == 0, done.stderr
    name = json.loads((clone.root / "releases/current.json").read_text())["release"]
    assert name in done.stdout
    before = clone.bytes_of(DRAFT)
    released = clone.bytes_of(Path("releases") / name / "draft")
    assert sorted(before.values()) == sorted(released.values())


def _flip_a_byte(path: Path) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    path.chmod(0o444)  # DVC's caches are read-only, and damage does not change that


def test_one_damaged_byte_is_told_kept_and_mended_by_its_row_group_alone(clone: Clone) -> None:
    folder = sorted((clone.root / HIDDEN_STATES).glob("rows_*"))[1]
    rows, old = folder / "rows.safetensors", clone.bytes_of(DRAFT)
    sound = rows.read_bytes()
    _flip_a_byte(rows)
    bad = rows.read_bytes()

    done = clone.repro()
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"extract: damaged: \w+/rows.safetensors: row", done.stderr), done.stderr
    assert rows.read_bytes() == sound and clone.bytes_of(DRAFT) == old
    assert "Stage 'merge' didn't change" in done.stdout
    (kept,) = (clone.root / ".cache/quarantine").glob("*/rows.safetensors")
    assert kept.read_bytes() == bad and (kept.parent / "reason.json").exists()
    assert bad not in clone.bytes_of(Path(".dvc/cache")).values()


def test_damage_that_dvc_does_not_see_is_refused_by_training_and_its_words_mend_it(clone: Clone) -> None:
    folder = sorted((clone.root / HIDDEN_STATES).glob("rows_*"))[0]
    rows, old = folder / "rows.safetensors", clone.bytes_of(DRAFT)
    sound, told = rows.read_bytes(), rows.stat()
    _flip_a_byte(rows)
    os.utime(rows, ns=(told.st_atime_ns, told.st_mtime_ns))  # as a disk does it

    assert "Stage 'extract' didn't change" in clone.dvc("repro", "extract").stdout
    done = clone.python("-m", "stages.train")
    assert done.returncode != 0 and clone.bytes_of(DRAFT) == old
    assert "bytes are not those that were written" in done.stderr
    assert re.search(rf"where: \S*{folder.name}/rows.safetensors: row", done.stderr), done.stderr
    (mend,) = re.findall(r"what to do: run `dvc (repro -f -s extract)`, then `dvc repro`", done.stderr)
    done = clone.dvc(*mend.split())
    assert done.returncode == 0 and rows.read_bytes() == sound, done.stderr[-3000:]
    done = clone.repro()
    assert done.returncode == 0 and "Stage 'merge' didn't change" in done.stdout
    assert clone.bytes_of(DRAFT) == old


@pytest.mark.parametrize(
    ("stage", "name", "reader"),
    [("prepare", "data/prepared/code/rows.parquet", "extract"), ("merge", "data/merged/index.parquet", "train")],
)
def test_damage_in_dvcs_own_copy_is_told_by_the_next_reader_and_its_words_mend_it(
    clone: Clone, stage: str, name: str, reader: str
) -> None:
    path = clone.root / name
    sound = path.read_bytes()
    _flip_a_byte(path)
    folder = Path(*Path(name).parts[:2])
    shutil.rmtree(clone.root / folder)
    assert clone.dvc("checkout", str(folder)).returncode == 0
    assert path.read_bytes() != sound  # what DVC holds is damaged, and it takes it for sound
    assert "up to date" in clone.dvc("repro", stage).stdout

    done = clone.python("-m", f"stages.{reader}")
    assert done.returncode != 0
    mend = re.findall(r"what to do: `((?:find|rm) [^`]+)`, then `dvc (repro \w+)`", done.stderr)
    assert mend, done.stderr
    subprocess.run(mend[0][0], cwd=clone.root, shell=True, check=True)
    assert clone.dvc(*mend[0][1].split()).returncode == 0
    assert path.read_bytes() == sound


@pytest.mark.parametrize(
    ("stage", "name"),
    [("prepare", "data/prepared/code/rows.parquet"), ("merge", "data/merged/vocabulary.safetensors")],
)
def test_damage_in_prepared_and_merged_rows_makes_their_stage_run_again(clone: Clone, stage: str, name: str) -> None:
    path = clone.root / name
    sound = path.read_bytes()
    _flip_a_byte(path)
    done = clone.dvc("repro", stage)
    assert done.returncode == 0 and f"Running stage '{stage}'" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert path.read_bytes() == sound
