"""stages/beside.py on the tiny line, and a promotion that stands on what it wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows import release
from stages import benchmark, beside, extract, merge, serve_validate, train
from stages.contracts.beside import BESIDE, BesideProduction
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError, EngineError, Refusal
from stages.contracts.files import canonical, file_digest, write_whole
from stages.contracts.manifest import MERGED_MANIFEST, MergedManifest
from stages.contracts.release import RELEASES, current
from stages.contracts.report import evidence_digests, report_path
from stages.targets._decoder import Decoder
from tests import line, tiny
from tests.flows.samples import gate_report

pytestmark = pytest.mark.slow
SOURCES = (line.TinySource("code", "coding", 60), line.TinySource("talk", "general", 50))


def _judge() -> DraftRecord:
    """Serve, benchmark and judge what stands in models/draft; gate-deployment's word is a sample."""
    serve_validate.main()
    benchmark.main()
    draft = DraftRecord.read(DRAFT / DRAFT_RECORD)
    judged = {"evidence": evidence_digests(Path())}
    gate_report("deployment", draft.digest()).model_copy(update=judged).write(report_path("deployment"))
    return draft


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose draft, trained a little, is production."""
    root = tmp_path_factory.mktemp("line")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        target = tiny.make_target(root / "target")
        prepared = line.write_prepared(root, target, SOURCES)
        bench = {"concurrencies": [1, 2], "draft_steps": [2], "requests": 2, "max_new_tokens": 6, "repeats": 3}
        serve = {"prompts_per_source": 12, "max_new_tokens": 24, "sampling_prompts": 0, "draft_steps": 2}
        steps = {"optimizer_steps": 60, "evaluate_every": 60, "checkpoint_every": 60}
        line.write_params(root, target, {"benchmark": bench, "serve": serve, "train": steps})
        line.write_gate_report(root, "extraction", prepared.digest())
        extract.main()
        merge.main()
        line.write_gate_report(root, "training", MergedManifest.read(MERGED_MANIFEST).digest())
        train.main()
        _judge()
        write_whole(root / "dvc.yaml", b"stages: {}\n")
        write_whole(root / "dvc.lock", b"schema: '2.0'\nstages: {}\n")
        release.promote(root)
    return root


@pytest.fixture
def here(promoted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, as the current folder."""
    shutil.copytree(promoted, tmp_path / "line")
    monkeypatch.chdir(tmp_path / "line")
    threads = torch.get_num_threads()
    yield Path()
    torch.set_num_threads(threads)


def _spoil(root: Path) -> DraftRecord:
    """Another draft in models/draft: the same one with its head's rows out of place, so that it proposes the wrong words."""
    path = root / DRAFT / "model.safetensors"
    path.chmod(0o644)
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(7, 0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    record = DraftRecord.read(root / DRAFT / DRAFT_RECORD)
    record.model_copy(update={"weights_digest": file_digest(path)}).write(root / DRAFT / DRAFT_RECORD)
    return _judge()


def test_productions_own_draft_is_as_good_as_itself_and_speaks_for_every_load(here: Path) -> None:
    beside.main()
    told = BesideProduction.read(BESIDE)
    overall = told.accept_length["overall"]
    assert told.draft_digest == told.production_draft_digest
    assert overall.new == overall.production > 1 and (overall.low, overall.high) == (0.0, 0.0)
    assert set(told.accept_length) == {"overall", "coding", "general"}
    assert {n: d.requests for n, d in told.accept_length.items()} == {"overall": 22, "coding": 12, "general": 10}
    assert [r.concurrency for r in told.throughput] == [1, 2] and all(
        r.low <= r.ratio <= r.high for r in told.throughput
    )
    assert round(told.confidence, 6) == 0.99, "five statements that hold at once at 95 %"


def test_a_candidate_that_is_worse_is_refused_and_the_interval_named(here: Path) -> None:
    production = current()
    spoilt = _spoil(here)
    beside.main()
    told = BesideProduction.read(BESIDE)
    d = told.accept_length["overall"]
    assert told.draft_digest == spoilt.digest() and d.new < d.production and d.high < 0
    with pytest.raises(Refusal, match="The new draft is a step back from production") as refused:
        release.promote(here)
    words = refused.value.text()
    assert (
        f"accept length, overall: {d.new:.3f} against {d.production:.3f} ({d.low:+.3f} to {d.high:+.3f} tokens, 22 requests)"
        in words
    )
    assert "no 99 % interval wholly below production's" in words
    assert current() == production


def test_a_production_that_is_not_there_or_damaged_or_of_another_target_is_told(here: Path) -> None:
    folder = RELEASES / str(current()) / "draft"
    kept = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(kept + b" ")
    with pytest.raises(DataError, match="A file of production's draft is not what its record says"):
        beside.main()
    (folder / "config.json").write_bytes(kept)
    (RELEASES / "current.json").unlink()
    with pytest.raises(Refusal, match="No release is production"):
        beside.main()
    assert not BESIDE.exists()


def test_another_targets_draft_is_refused_before_anything_is_served(here: Path) -> None:
    """Of a target the check asks for its sizes and its embedding only."""
    sizes = SimpleNamespace(hidden_size=32, vocab_size=tiny.LAYERS)
    other = SimpleNamespace(config=sizes, embedding=torch.zeros(tiny.LAYERS, 32))
    with pytest.raises(
        EngineError, match=r"Production's draft does not fit this target(.|\n)*hidden_size 64: the target has 32"
    ):
        beside._demand_fits(RELEASES / str(current()) / "draft", cast(Decoder, other))


def test_only_the_engine_of_this_process_measures_two_drafts(here: Path) -> None:
    path = Path("params.yaml")
    told = json.loads(path.read_text())
    told["serve"]["engine"] = "sglang"
    path.write_bytes(canonical(told))
    with pytest.raises(Refusal, match="in the engine of this process only"):
        beside.main()
