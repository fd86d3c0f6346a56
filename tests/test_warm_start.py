"""Going on from an earlier draft: what is carried over, what is said of it, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages import train
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import EngineError, LineError, Refusal
from stages.contracts.files import file_digest
from stages.contracts.manifest import MERGED, MERGED_MANIFEST, MergedManifest
from stages.contracts.release import POINTER, RELEASES
from stages.drafts._start import carry_over
from stages.drafts.eagle3 import Eagle3, Eagle3Config, read_draft
from tests import line
from tests.drafts.reference import CONFIG
from tests.test_train import merged_line  # noqa: F401

EARLIER = Path("earlier")


@pytest.fixture(scope="module")
def trained_line(merged_line: Path) -> Path:  # noqa: F811
    """The line with a draft that was trained on it, at `earlier` and as the current release."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(merged_line)
        set_params(optimizer_steps=30, evaluate_every=30)
        threads = torch.get_num_threads()
        train.main()
        torch.set_num_threads(threads)
        shutil.move(DRAFT, EARLIER)
        shutil.rmtree("reports/curves")
        Path("reports/train.json").unlink()
        shutil.copytree(EARLIER, RELEASES / "abc" / "draft")
        POINTER.write_text('{"release": "abc"}')
    return merged_line


@pytest.fixture
def here(trained_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(trained_line, tmp_path / "line")
    monkeypatch.chdir(tmp_path / "line")
    threads = torch.get_num_threads()
    yield Path()
    torch.set_num_threads(threads)


def set_params(merge: dict[str, object] | None = None, **values: object) -> None:
    line.write_params(Path(), Path("target").absolute(), {"train": values, "merge": merge or {}})


def refused() -> LineError:
    with pytest.raises(LineError) as caught:
        train.main()
    assert not DRAFT.exists()
    return caught.value


@pytest.mark.parametrize("start", ["earlier", "current_release"])
def test_training_goes_on_from_the_earlier_drafts_weights_and_its_record_names_it(here: Path, start: str) -> None:
    set_params(start_from=start, optimizer_steps=1, learning_rate=1e-9)
    train.main()
    record, earlier = DraftRecord.read(DRAFT / DRAFT_RECORD), DraftRecord.read(EARLIER / DRAFT_RECORD)
    assert record.start is not None and record.start.draft_digest == earlier.digest()
    assert record.start.weights_digest == earlier.weights_digest and record.start.vocabulary == "keep"
    assert (record.start.ids_kept, record.start.ids_new) == (record.draft_vocab_size, 0)
    assert record.start.coverage_train == 1.0, "bytes are all in the vocabulary"
    own, theirs = (load_file(folder / "model.safetensors") for folder in (DRAFT, EARLIER))
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)


def test_a_draft_from_the_target_says_nothing_of_a_start(here: Path) -> None:
    assert "start" not in json.loads((EARLIER / DRAFT_RECORD).read_text())


def test_before_the_first_release_training_starts_from_the_target_and_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    POINTER.unlink()
    set_params(start_from="current_release", optimizer_steps=2)
    train.main()
    assert DraftRecord.read(DRAFT / DRAFT_RECORD).start is None
    assert "there is no release yet, so training starts from the target" in capsys.readouterr().err


def test_another_start_is_another_run_to_resume(here: Path) -> None:
    set_params(start_from="earlier")
    first = train.resume_points(train.read_inputs(train.load_params(), "cpu"))
    record = DraftRecord.read(EARLIER / DRAFT_RECORD)
    record.model_copy(update={"optimizer_steps": 29}).write(EARLIER / DRAFT_RECORD)
    second = train.resume_points(train.read_inputs(train.load_params(), "cpu"))
    assert first.root != second.root and first.of["the start"] != second.of["the start"]


def rewrite(**changes: object) -> None:
    record = DraftRecord.read(EARLIER / DRAFT_RECORD)
    DraftRecord.model_validate(record.model_dump() | changes).write(EARLIER / DRAFT_RECORD)


def test_a_draft_of_another_target_is_refused(here: Path) -> None:
    record = DraftRecord.read(EARLIER / DRAFT_RECORD)
    rewrite(target=record.target.model_copy(update={"weights_digest": "sha256:0"}).model_dump())
    set_params(start_from="earlier")
    error = refused()
    assert isinstance(error, Refusal) and "target weights sha256:" in error.expected and error.got == "sha256:0"
    assert "train.start_from, or null" in error.do


def test_a_draft_of_other_points_is_refused(here: Path) -> None:
    record = DraftRecord.read(EARLIER / DRAFT_RECORD)
    rewrite(capture=record.capture.model_copy(update={"points": (1, 2, 5)}).model_dump())
    set_params(start_from="earlier")
    error = refused()
    assert error.expected == "capture points [1, 3, 5]" and error.got == "[1, 2, 5]"


def test_a_draft_of_other_sizes_is_refused_all_at_once(here: Path) -> None:
    set_params(start_from="earlier", heads=2, kv_heads=1)
    error = refused()
    assert error.expected == "train.heads 2; train.kv_heads 1" and error.got == "4; 2"


def test_a_draft_of_other_norms_is_refused(here: Path) -> None:
    set_params(start_from="earlier", norms=["fc_norm", "norm_output"])
    error = refused()
    assert isinstance(error, Refusal)
    assert error.expected == "train.norms ['fc_norm', 'norm_output']" and error.got == "[]"


def test_a_draft_whose_record_has_other_norms_than_its_config_is_refused(here: Path) -> None:
    record = DraftRecord.read(EARLIER / DRAFT_RECORD)
    record.model_copy(update={"norms": ("norm_output",)}).write(EARLIER / DRAFT_RECORD)
    set_params(start_from="earlier")
    error = refused()
    assert error.expected == "norms in its record []" and error.got == "['norm_output']"


def test_training_goes_on_from_a_draft_of_the_same_norms(here: Path) -> None:
    told = {"norms": ["fc_norm", "norm_output"], "optimizer_steps": 1, "evaluate_every": 1}
    set_params(**told)
    train.main()
    shutil.rmtree(EARLIER)
    shutil.move(DRAFT, EARLIER)
    set_params(start_from="earlier", **told | {"learning_rate": 1e-9})
    train.main()
    own, theirs = (load_file(folder / "model.safetensors") for folder in (DRAFT, EARLIER))
    assert "fc_norm.2.weight" in own and not torch.equal(theirs["fc_norm.2.weight"], torch.ones(64))
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)


def test_a_draft_whose_files_are_not_its_records_is_refused(here: Path) -> None:
    rewrite(weights_digest="sha256:1")
    set_params(start_from="earlier")
    error = refused()
    assert "its weights are of sha256:1" in error.expected and "earlier/model.safetensors has sha256:" in error.got


def test_a_folder_without_a_draft_is_told(here: Path) -> None:
    set_params(start_from="nowhere")
    error = refused()
    assert error.what == "There is no draft that training could go on from" and "(nowhere)" in error.where


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 5e5), ("rms_norm_eps", 1e-3)])
def test_a_draft_that_computes_with_other_figures_is_refused(here: Path, key: str, value: float) -> None:
    config = Path("earlier/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    rewrite(config_digest=file_digest(config))
    set_params(start_from="earlier")
    assert f"{value}" in (refused().got or "")


def test_a_trained_head_is_not_quietly_replaced_by_the_targets(here: Path) -> None:
    set_params(start_from="earlier", head="trained", optimizer_steps=30, learning_rate=0.05, evaluate_every=30)
    train.main()
    shutil.rmtree(EARLIER)
    shutil.move(DRAFT, EARLIER)
    set_params(start_from="earlier", head="frozen")
    error = refused()
    assert isinstance(error, EngineError) and "set train.head: trained" in error.do


def smaller_vocabulary(ids: list[int]) -> None:
    """The merged set with another draft vocabulary, as merge would write it after other data."""
    from safetensors.torch import save_file

    from stages.contracts.files import file_digest

    merged = MergedManifest.read(MERGED_MANIFEST)
    t2d = torch.zeros(merged.target.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    path = MERGED / "vocabulary.safetensors"
    path.unlink()
    save_file({"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": t2d}, path)
    changed = merged.model_copy(update={"draft_vocab_size": len(ids), "vocabulary_digest": file_digest(path)})
    changed.write(MERGED_MANIFEST)
    line.write_gate_report(Path(), "training", changed.digest())


def test_a_rebuilt_vocabulary_carries_rows_over_by_target_id_and_the_record_counts_them(here: Path) -> None:
    ids = list(range(3, 200))
    smaller_vocabulary(ids)
    told = {"start_from": "earlier", "optimizer_steps": 1, "learning_rate": 1e-9}
    set_params(merge={"draft_vocab_size": len(ids)}, **told)
    assert "merge.draft_vocab_size 197" in refused().expected, "kept, it has another size"
    set_params(merge={"draft_vocab_size": len(ids)}, start_vocabulary="rebuild", **told)
    train.main()
    start = DraftRecord.read(DRAFT / DRAFT_RECORD).start
    assert start is not None and start.vocabulary == "rebuild"
    assert (start.ids_kept, start.ids_new, start.ids_of_merged) == (197, 0, 197) and start.coverage_train <= 1
    assert read_draft(DRAFT).target_ids().tolist() == ids


def test_head_rows_go_by_target_id_and_new_ids_keep_the_targets_rows() -> None:
    def draft(size: int, fill: float) -> Eagle3:
        config = Eagle3Config(**{**CONFIG.__dict__, "draft_vocab_size": size})
        made = Eagle3(config, torch.zeros(40, 16))
        with torch.no_grad():
            made.lm_head.weight.copy_(fill + torch.arange(size)[:, None].expand(size, 16).float())
        return made

    earlier, own = draft(4, 100.0), draft(5, 0.0)
    tensors = {n: p.detach() for n, p in earlier.named_parameters()}
    kept = carry_over(own, tensors, torch.tensor([2, 5, 9, 30]), torch.tensor([1, 5, 10, 30, 31]))
    assert kept == 2 and own.lm_head.weight[:, 0].tolist() == [0.0, 101.0, 2.0, 103.0, 4.0]
    assert torch.equal(own.fc.weight, earlier.fc.weight)
