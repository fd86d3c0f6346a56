"""stages/train.py on the tiny line: what it writes, exact resume, and what it refuses."""

from __future__ import annotations

import csv
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from stages import extract, merge, train
from stages._served import open_served, read_recorded
from stages._train_judge import train_like
from stages.capture.store import RowStore
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError, EngineError, LineError, Refusal
from stages.contracts.evidence import TRAIN_CURVES, TRAIN_METRICS, TrainMetrics
from stages.contracts.files import file_digest
from stages.contracts.manifest import HIDDEN_STATES, MERGED, MERGED_MANIFEST, MergedManifest
from stages.contracts.report import report_path
from stages.drafts import _resume
from stages.drafts._resume import ResumePoints, ResumeState
from stages.drafts._watch import LossWatch
from stages.drafts.eagle3 import Ahead, PackedBatch, Session, Trainer, read_draft
from tests import line, tiny
from tests.test_killed import killed


@pytest.fixture(scope="module")
def merged_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything up to gate-training has run."""
    root = tmp_path_factory.mktemp("line")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        target = tiny.make_target(root / "target")
        line.write_params(root, target)
        prepared = line.write_prepared(root, target)
        line.write_gate_report(root, "extraction", prepared.digest())
        extract.main()
        merge.main()
        line.write_gate_report(root, "training", MergedManifest.read(MERGED_MANIFEST).digest())
    return root


@pytest.fixture
def here(merged_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the line, as the current folder."""
    shutil.copytree(merged_line, tmp_path / "line")
    monkeypatch.chdir(tmp_path / "line")
    set_params(Path())
    threads = torch.get_num_threads()
    yield Path()
    torch.set_num_threads(threads)


def set_params(here: Path, **values: object) -> None:
    line.write_params(here, (here / "target").absolute(), {"train": values})


def test_a_run_leaves_a_draft_its_record_metrics_and_curves(here: Path) -> None:
    train.main()
    record, merged = DraftRecord.read(DRAFT / DRAFT_RECORD), MergedManifest.read(MERGED_MANIFEST)
    assert record.merged_digest == merged.digest() and record.points == tiny.POINTS
    assert record.layer_ids == tuple(p - 1 for p in tiny.POINTS) == read_draft(DRAFT).layer_ids
    assert record.weights_digest == file_digest(DRAFT / "model.safetensors")
    metrics = TrainMetrics.read(TRAIN_METRICS)
    assert metrics.draft_digest == record.digest()
    assert metrics.overall.requests == merged.held_out_rows == sum(a.requests for a in metrics.by_domain.values())
    curve = list(csv.DictReader((TRAIN_CURVES / "held_out.csv").open()))
    assert [row["step"] for row in curve] == ["6", "12"]
    assert max(float(row["accept_length"]) for row in curve) == pytest.approx(metrics.overall.accept_length, abs=1e-5)
    assert [row["step"] for row in csv.DictReader((TRAIN_CURVES / "training.csv").open())] == ["10"]
    (speed,) = csv.DictReader((TRAIN_CURVES / "speed.csv").open())
    assert float(speed["tokens_per_s"]) > 0 and 0 < float(speed["waiting_share"]) < 1
    assert float(speed["peak_memory_mb"]) > 50
    assert not list(train.WORK.glob("*"))


def test_every_evaluation_has_an_interval_places_domains_and_rows_that_were_trained_on(here: Path) -> None:
    set_params(here, evaluate_train_rows=5)
    train.main()
    for row in csv.DictReader((TRAIN_CURVES / "held_out.csv").open()):
        figures = {name: float(value) for name, value in row.items()}
        assert 1 <= figures["low"] <= figures["accept_length"] <= figures["high"] <= 4
        assert figures["accepted_1"] >= figures["accepted_2"] >= figures["accepted_3"] >= 0
        assert {n.removeprefix("accept_length_") for n in figures if n.startswith("accept_length_")} == {
            s.domain for s in line.SOURCES
        }
        assert 1 <= figures["train_like"] <= 4
    known = TrainMetrics.read(TRAIN_METRICS).train_like
    assert known is not None and known.requests == 5


def test_the_training_rows_that_are_watched_are_always_the_same_and_of_every_source(here: Path) -> None:
    rows = train.read_rows(RowStore(HIDDEN_STATES), torch.device("cpu"))
    watched = train_like(rows, 6)
    assert len(watched) == 6 and watched == train_like(rows, 6) and set(watched) < set(rows.train)
    assert {row.domain for row in watched} == {row.domain for row in rows.train}
    assert not train_like(rows, 0) and len(train_like(rows, 10_000)) == len(rows.train)


def test_a_batch_is_its_rows_end_to_end_in_float32(here: Path) -> None:
    rows = train.read_rows(RowStore(HIDDEN_STATES), torch.device("cpu"))
    members = [rows.train[i] for i in (3, 0, 5)]
    batch = rows.pack(members)
    at = 0
    for row in members:
        states, ids, mask = rows.store.row(row.folder, row.row_in_folder)
        part = slice(at, at := at + row.length)
        assert torch.equal(batch.aux[part], states[:, :3].float().flatten(1))
        assert torch.equal(batch.last[part], states[:, 3].float())
        assert torch.equal(batch.input_ids[part], ids.long()) and torch.equal(batch.loss_mask[part], mask.bool())
    assert at == len(batch.aux) == len(batch.last) == len(batch.input_ids) and batch.last.is_contiguous()


def test_a_run_that_no_longer_improves_stops_early_and_exports_its_best(here: Path) -> None:
    set_params(here, optimizer_steps=40, evaluate_every=2, stop_after=3, learning_rate=1e-9)
    train.main()
    metrics = TrainMetrics.read(TRAIN_METRICS)
    assert metrics.stopped_after == 8, "the first evaluation, and three that are no better"
    assert DraftRecord.read(DRAFT / DRAFT_RECORD).optimizer_steps == metrics.optimizer_steps <= 8


def test_a_run_that_goes_on_improving_is_not_stopped(here: Path) -> None:
    set_params(here, optimizer_steps=12, evaluate_every=12, stop_after=1)
    train.main()
    assert TrainMetrics.read(TRAIN_METRICS).stopped_after is None


def test_twice_the_same_run_is_the_same_bytes(here: Path) -> None:
    train.main()
    first = DraftRecord.read(DRAFT / DRAFT_RECORD)
    train.main()
    assert DraftRecord.read(DRAFT / DRAFT_RECORD) == first


def test_a_run_that_reads_ahead_leaves_the_same_bytes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train.main()
    first = DraftRecord.read(DRAFT / DRAFT_RECORD)
    whole, asked = Session.__init__, []

    def ahead(self: Session, *args: object, **named: object) -> None:
        asked.append(named["read_ahead"])
        whole(self, *args, **{**named, "read_ahead": True})  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "__init__", ahead)
    train.main()
    assert DraftRecord.read(DRAFT / DRAFT_RECORD) == first and asked == [False]


def test_a_run_that_makes_its_steps_again_leaves_the_same_bytes(here: Path) -> None:
    train.main()
    kept = (DRAFT / "model.safetensors").read_bytes()
    set_params(here, recompute_steps=True)
    train.main()
    assert (DRAFT / "model.safetensors").read_bytes() == kept


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the run die in the step after `step`, as a killed process would."""
    whole = Trainer.train

    def train_or_die(self: Trainer, batch: object) -> object:
        if self.step == step:
            raise KeyboardInterrupt
        return whole(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train", train_or_die)


def unmeasured_curves() -> dict[str, bytes]:
    """All but speed.csv, on which no two runs agree."""
    return {p.name: p.read_bytes() for p in TRAIN_CURVES.iterdir() if p.name != "speed.csv"}


def test_ten_steps_and_ten_resumed_are_the_bits_of_twenty(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_params(here, optimizer_steps=20, checkpoint_every=5, evaluate_every=4)
    train.main()
    whole = (DraftRecord.read(DRAFT / DRAFT_RECORD), TRAIN_METRICS.read_bytes())
    curves = unmeasured_curves()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(13, patch)
        train.main()
    (point,) = train.WORK.glob("*/step_*")
    assert point.name == "step_000010"
    train.main()
    assert (DraftRecord.read(DRAFT / DRAFT_RECORD), TRAIN_METRICS.read_bytes()) == whole
    assert unmeasured_curves() == curves


NORMS = ["norm_output", "fc_norm"]


def test_norms_are_trained_resumed_recorded_and_read_back(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_params(here, norms=NORMS, checkpoint_every=6)
    train.main()
    record = DraftRecord.read(DRAFT / DRAFT_RECORD)
    assert record.norms == ("fc_norm", "norm_output") == read_recorded().config.norms
    weights = load_file(DRAFT / "model.safetensors")
    assert all(bool((weights[f"fc_norm.{i}.weight"] != 1).any()) for i in range(3)), "they learn"
    interrupted(monkeypatch)
    train.main()
    assert DraftRecord.read(DRAFT / DRAFT_RECORD) == record


def test_a_resume_point_of_other_norms_is_left_alone_and_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = interrupted(monkeypatch)
    set_params(here, norms=NORMS)
    train.main()
    said = capsys.readouterr().err
    assert f"left alone: an unfinished run in {point}" in said
    assert "train.norms was None, is ['fc_norm', 'norm_output']" in said and "resumed" not in said


def test_a_plain_drafts_params_and_record_say_nothing_of_norms(here: Path) -> None:
    params = train.load_params()
    assert params.train.norms == () and "norms" not in params.train.model_dump(mode="json")
    train.main()
    assert "norms" not in (DRAFT / DRAFT_RECORD).read_text()


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("fc_norm", r"fc_norm\.0\.weight is unknown"),
        ("norm_output", r"expected: \['fc_norm', 'norm_output'\], as in the draft's record\n  got: \['fc_norm'\]"),
    ],
)
def test_a_draft_whose_config_lost_a_norm_is_not_served(here: Path, lost: str, words: str) -> None:
    set_params(here, norms=NORMS)
    train.main()
    path = DRAFT / "config.json"
    config = json.loads(path.read_text())
    del config[lost]
    path.write_text(json.dumps(config))
    with pytest.raises(EngineError, match=words):
        open_served(train.load_params(), DraftRecord.read(DRAFT / DRAFT_RECORD))


def interrupted(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run killed after its first resume point; returns the point's folder."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(7, patch)
        train.main()
    (point,) = train.WORK.glob("*/step_*")
    return point


@pytest.mark.parametrize("fault", ["flip", "cut", "no tensors", "no state", "state cut", "state a folder"])
def test_a_damaged_resume_point_is_refused_by_name(here: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    point = interrupted(monkeypatch)
    tensors = point / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    if fault == "flip":
        data[-100] ^= 1
        tensors.write_bytes(data)
    elif fault == "cut":
        tensors.write_bytes(data[: len(data) // 2])
    elif fault == "no tensors":
        tensors.unlink()
    else:
        state = point / "resume.json"
        text = state.read_text()
        state.unlink()
        if fault == "state cut":
            state.write_text(text[: len(text) // 2])
        elif fault == "state a folder":
            state.mkdir()
    with pytest.raises(DataError, match=r"step_000006/(tensors.safetensors|resume.json)") as told:
        train.main()
    assert "A resume point is damaged" in told.value.what and f"`rm -r {point}`" in told.value.do
    assert not DRAFT.exists()
    if fault == "state cut":
        shutil.rmtree(point)
        train.main()
        assert DRAFT.exists()


def test_a_copy_laid_beside_the_resume_points_is_none(tmp_path: Path) -> None:
    points = ResumePoints(tmp_path)
    points.save(15, {"weight": torch.ones(2)}, {"best": 1})
    for stray in ("step_000099.bak", "step_99", "step_000099 (copy)"):
        shutil.copytree(tmp_path / "step_000015", tmp_path / stray)
    found = points.load()
    assert found is not None and found[0] == 15 and found[2] == {"best": 1}


def test_a_resume_point_that_the_disk_does_not_hold_is_an_error_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = ResumePoints(tmp_path)
    points.save(15, {"weight": torch.ones(2)}, {})

    def full(tensors: object, path: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(_resume, "save_file", full)
    with pytest.raises(DataError, match=r"cannot be written(.|\n)*No space left(.|\n)*free some space"):
        points.save(30, {"weight": torch.ones(2)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step_000015"]


def test_a_resume_point_of_other_settings_is_left_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch)
    set_params(here, learning_rate=0.002)
    train.main()
    assert [p.name for p in train.WORK.glob("*/step_*")] == ["step_000006"]


def test_a_loss_that_is_no_number_stops_and_names_the_rows(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[str] = []
    pack = train.Rows.pack

    def with_nan(self: train.Rows, members: object) -> object:
        batch = pack(self, members)  # type: ignore[arg-type]
        batch.last[:] = torch.nan
        rows.extend(batch.row_ids)
        return batch

    monkeypatch.setattr(train.Rows, "pack", with_nan)
    with pytest.raises(DataError, match="no longer a number") as caught:
        train.main()
    assert all(row in caught.value.where for row in rows) and "optimizer step 0" in caught.value.where
    assert not DRAFT.exists()


def test_a_loss_that_jumps_stops_names_the_rows_and_leaves_no_resume_point_of_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_params(here, optimizer_steps=40, checkpoint_every=1, evaluate_every=40, max_loss_jump=1.2)
    rows: list[str] = []
    pack, calls = train.Rows.pack, iter(range(100))

    def once_strange(self: train.Rows, members: object) -> object:
        batch = pack(self, members)  # type: ignore[arg-type]
        if next(calls) == 25:
            batch.aux.mul_(-300.0)
            batch.last.neg_()
            rows.extend(batch.row_ids)
        return batch

    monkeypatch.setattr(train.Rows, "pack", once_strange)
    with pytest.raises(DataError, match=r"The loss jumped") as caught:
        train.main()
    assert rows and all(row in caught.value.where for row in rows) and "optimizer step 25" in caught.value.where
    assert "lower train.learning_rate" in caught.value.do and not DRAFT.exists()
    assert [p.name for p in train.WORK.glob("*/step_*")] == ["step_000024"]


def test_weights_that_came_apart_leave_no_resume_point_and_the_run_goes_on_from_before(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The update before a resume point ruins the weights: only the next step's loss can tell."""
    set_params(here, optimizer_steps=30, checkpoint_every=10, evaluate_every=30, max_loss_jump=1.5)
    step, rows = Trainer.train, dict[int, list[str]]()

    def ruinous(self: Trainer, *batches: PackedBatch) -> Ahead:
        rows[self.step] = [row for batch in batches for row in batch.row_ids]
        ahead = step(self, *batches)
        if self.step == 20:
            with torch.no_grad():
                for parameter in self.draft.parameters():
                    parameter.mul_(-40 if parameter.requires_grad and parameter.dim() > 1 else 1)
        return ahead

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", ruinous)
        with pytest.raises(DataError, match=r"The loss jumped(.|\n)*the update before it was of rows") as caught:
            train.main()
    assert all(row in caught.value.where for row in rows[19] + rows[20])
    assert [p.name for p in train.WORK.glob("*/step_*")] == ["step_000010"]
    train.main()
    assert "resumed after step 10" in capsys.readouterr().err and DRAFT.exists()


def test_losses_about_zero_are_no_jumps() -> None:
    watch = LossWatch(4.0)
    for step, loss in enumerate([0.0002, -0.0001] * 20 + [0.09]):
        watch.see(step, loss, ["row"])
    with pytest.raises(DataError, match="The loss jumped"):
        watch.see(41, 0.2, ["row"])


def test_rows_that_no_draft_could_be_asked_about_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = train.Rows.pack

    def one_by_one(self: train.Rows, members: object) -> PackedBatch:
        batch = pack(self, members)  # type: ignore[arg-type]
        batch.loss_mask[::2] = False
        return batch

    monkeypatch.setattr(train.Rows, "pack", one_by_one)
    with pytest.raises(Refusal, match="No train row has a pair that a draft could be asked for"):
        train.main()
    assert not DRAFT.exists()


@pytest.mark.slow
def test_killed_at_any_moment_a_run_goes_on_from_its_last_whole_point_to_the_same_bits(here: Path) -> None:
    set_params(here, optimizer_steps=30, checkpoint_every=1, evaluate_every=6)
    started = time.monotonic()
    train.main()
    took = time.monotonic() - started
    whole = (DraftRecord.read(DRAFT / DRAFT_RECORD), TRAIN_METRICS.read_bytes(), unmeasured_curves())
    moments, hit, rounds = random.Random(3), 0, 0
    while hit < 6 or rounds < 6:
        rounds += 1
        shutil.rmtree(DRAFT)
        TRAIN_METRICS.unlink()
        while killed(train.main, moments.uniform(0, 0.7 * took)):
            hit += 1
            points = [p for p in train.WORK.glob("*/step_*") if p.suffix == ""]
            assert all((p / "resume.json").exists() and (p / "tensors.safetensors").exists() for p in points)
        found = (DraftRecord.read(DRAFT / DRAFT_RECORD), TRAIN_METRICS.read_bytes(), unmeasured_curves())
        assert found == whole and not [p for p in Path().rglob("*") if p.suffix in (".part", ".old")]


@pytest.mark.parametrize(
    "changed",
    ["train.optimizer_steps", "the merged rows", "the draft vocabulary", "the start", "the products", "the device"],
)
def test_a_resume_point_of_another_run_is_refused_and_what_differs_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    point = interrupted(monkeypatch)
    state = ResumeState.read(point / "resume.json")
    state.model_copy(update={"of": state.of | {changed: "of last week"}}).write(point / "resume.json")
    with pytest.raises(Refusal, match="This resume point is of another run") as caught:
        train.main()
    assert f"{changed} was of last week, is " in caught.value.got and f"`rm -r {point}`" in caught.value.do
    assert not DRAFT.exists()


def test_more_optimizer_steps_are_another_run_which_says_what_it_leaves_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = interrupted(monkeypatch)
    set_params(here, optimizer_steps=14)
    capsys.readouterr()
    train.main()
    said = capsys.readouterr().err
    assert f"left alone: an unfinished run in {point} (train.optimizer_steps was 12, is 14)" in said
    assert "resumed" not in said and point.exists()


def refused(here: Path) -> LineError:
    """Run train beside an old draft; it must refuse and leave the old draft as it is."""
    DRAFT.mkdir(parents=True)
    (DRAFT / "model.safetensors").write_bytes(b"of last week")
    with pytest.raises(LineError) as caught:
        train.main()
    assert (DRAFT / "model.safetensors").read_bytes() == b"of last week" and not TRAIN_METRICS.exists()
    return caught.value


def test_without_a_gate_report_nothing_is_trained(here: Path) -> None:
    report_path("training").unlink()
    assert isinstance(refused(here), Refusal)


def test_a_failed_gate_is_a_refusal(here: Path) -> None:
    line.write_gate_report(here, "training", MergedManifest.read(MERGED_MANIFEST).digest(), success=False)
    assert "gate-training refused this" in refused(here).text()


def test_one_byte_of_one_folder_is_seen(here: Path) -> None:
    file = sorted(HIDDEN_STATES.glob("rows_*/rows.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()
    file.write_bytes(data)
    assert file.parent.name in refused(here).where


def test_another_target_is_seen(here: Path) -> None:
    shutil.rmtree(here / "target")
    tiny.make_target(here / "target", seed=5)
    assert "the target's weights" in refused(here).what


@pytest.mark.parametrize("name", ["vocabulary.safetensors", "index.parquet"])
def test_a_file_of_the_merged_set_that_changed_is_seen(here: Path, name: str) -> None:
    with (MERGED / name).open("ab") as file:
        file.write(b" ")
    assert name in refused(here).where


def test_an_untrained_draft_starts_from_the_target(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_params(here, optimizer_steps=1, learning_rate=1e-9)
    train.main()
    own, target = load_file(DRAFT / "model.safetensors"), load_file(here / "target" / "model.safetensors")
    ids = own["t2d"].nonzero()[:, 0]
    torch.testing.assert_close(own["lm_head.weight"], target["lm_head.weight"][ids], atol=1e-6, rtol=0)
    torch.testing.assert_close(own["norm.weight"], target["model.norm.weight"], atol=1e-6, rtol=0)
    assert "embed_tokens.weight" not in own
