"""The gates over real files: a tiny line passes, and the faults of the field are refused by name."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages import _gate_states, extract, gate, merge
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import DataError, LineError, Refusal
from stages.contracts.evidence import BENCHMARK_EVIDENCE, POLICY, SERVE_EVIDENCE, TRAIN_METRICS
from stages.contracts.files import file_digest
from stages.contracts.manifest import (
    HIDDEN_STATES,
    MERGED_MANIFEST,
    PREPARED_MANIFEST,
    MergedManifest,
    PreparedManifest,
)
from stages.contracts.report import GateName, GateReport, report_path
from stages.reporting.page import PAGE
from stages.targets import identify_target
from tests import latent, tiny
from tests.gates import passing
from tests.line import SOURCES, write_params, write_prepared

Points = tuple[int, ...]


def judge(monkeypatch: pytest.MonkeyPatch, name: GateName) -> GateReport:
    """Run a gate here and return its report, refused or not."""
    monkeypatch.setattr(sys, "argv", ["gate", name])
    try:
        gate.main()
    except Refusal as refusal:
        assert not GateReport.read(report_path(name)).success, refusal
    return GateReport.read(report_path(name))


def failed(report: GateReport) -> dict[str, str]:
    return {c.assertion: "\n".join([c.actual, *c.failing]) for c in report.checks if not c.success}


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny line with prepared rows, in the current folder."""
    return lay_line(tmp_path, tiny.make_target(tmp_path / "target"), monkeypatch)


def lay_line(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sources = [
        {
            "name": s.name,
            "kind": "jsonl",
            "path": "x",
            "domain": s.domain,
            "licence": "MIT",
            "answers": "regenerate",
            "limit": 50,
        }
        for s in SOURCES
    ]
    path = write_params(tmp_path, folder, {"prepare": {"sources": sources}})
    raw = json.loads(path.read_text())
    raw["gates"]["extraction"] |= {
        "min_rows": 20,
        "min_held_out_rows": 4,
        "min_supervised_tokens": 50,
        "max_capped_share": 1.0,
    }
    path.write_text(json.dumps(raw))
    write_prepared(tmp_path, folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def capture(monkeypatch: pytest.MonkeyPatch, points: Points | None = None) -> None:
    """Extract and merge; with `points`, the capturing engine takes these, whatever it was asked for."""
    if points:
        honest = extract.capture_rows
        monkeypatch.setattr(
            extract, "capture_rows", lambda target, rows, _, tokens: honest(target, rows, points, tokens)
        )
    assert failed(judge(monkeypatch, "extraction")) == {}
    extract.main()
    merge.main()


def test_a_good_line_passes_both_gates_with_reports_bound_to_their_subjects(
    line: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capture(monkeypatch)
    report = judge(monkeypatch, "training")
    assert failed(report) == {}
    assert report.subject_digest == MergedManifest.read(MERGED_MANIFEST).digest()
    assert (
        GateReport.read(report_path("extraction")).subject_digest == PreparedManifest.read(PREPARED_MANIFEST).digest()
    )
    assert "slots" in capsys.readouterr().out
    before = report_path("training").read_bytes()
    judge(monkeypatch, "training")
    assert report_path("training").read_bytes() == before, "equal inputs, equal bytes"
    assert not PAGE.exists(), "the page is gate-deployment's output; an earlier gate that passes leaves it alone"


def hold_target(line: Path, load: str) -> None:
    raw = json.loads((line / "params.yaml").read_text())
    raw["gates"]["training"]["target_load"] = load
    (line / "params.yaml").write_text(json.dumps(raw))


@pytest.fixture
def kimis_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A line on a target of Kimi-K2.5's kind (latent attention, mixture of experts), in a file a layer, read from there."""
    folder = latent.make_target(tmp_path / "target", "kimi_k25", rope_scaling=latent.YARN)
    latent.shard(folder, load_file(folder / "model.safetensors"), tiny.LAYERS)
    line = lay_line(tmp_path, folder, monkeypatch)
    hold_target(line, "layer_by_layer")
    return line


def test_a_target_left_in_its_files_proves_the_layers_and_the_gate_says_how_it_was_held(
    kimis_line: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capture(monkeypatch)
    assert failed(judge(monkeypatch, "training")) == {}
    words = "gate-training: the target is read layer by layer, as params.yaml says: 0.00 GB of weights, "
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_shift_is_named_by_a_target_left_in_its_files(kimis_line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(monkeypatch, (2, 4, 6))
    found = failed(judge(monkeypatch, "training"))
    assert "every slot is shifted by +1 layer" in found["of all the target's points, the nearest is the claimed one"]


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ((2, 4, 6), "every slot is shifted by +1 layer"),
        ((0, 2, 4), "every slot is shifted by -1 layer; a slot holds the embedding (point 0)"),
        ((0, 1, 3), "the embedding was put first and the last point dropped"),
    ],
)
def test_states_of_other_layers_are_refused_before_training_and_named(
    line: Path, monkeypatch: pytest.MonkeyPatch, points: Points, words: str
) -> None:
    capture(monkeypatch, points)
    found = failed(judge(monkeypatch, "training"))
    assert words in found["of all the target's points, the nearest is the claimed one"]
    assert words in PAGE.read_text().replace("&#39;", "'")


def test_one_folder_of_many_with_other_layers_is_refused_and_named_with_its_slots(
    line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = extract.capture_rows, iter(range(100))

    def one_shifted(target, rows, points, tokens):  # type: ignore[no-untyped-def]
        return honest(target, rows, [p - 1 for p in points] if next(calls) == 1 else points, tokens)

    monkeypatch.setattr(extract, "capture_rows", one_shifted)
    capture(monkeypatch)
    assert len(MergedManifest.read(MERGED_MANIFEST).folders) > 3
    report = judge(monkeypatch, "training")
    (check,) = [c for c in report.checks if c.assertion == "of all the target's points, the nearest is the claimed one"]
    assert [f.split(":")[0] for f in check.failing] == [f"rows_6-12 slot {i}" for i in range(3)]
    assert all("every slot is shifted by -1 layer" in f for f in check.failing)
    assert f"rm -r .cache/states/{MergedManifest.read(MERGED_MANIFEST).capture.key} " in check.do


def test_every_folder_gives_a_row_until_there_are_too_many_and_then_the_report_says_how_many_did_not(
    line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(monkeypatch)
    folders = len(MergedManifest.read(MERGED_MANIFEST).folders)
    slots = [c for c in judge(monkeypatch, "training").checks if c.table == "slots"]
    assert f"over {4 * folders} rows" in slots[-1].actual and "unprobed" not in slots[-2].expected
    monkeypatch.setattr(_gate_states, "MOST_PROBED", 2)
    monkeypatch.setattr(
        _gate_states, "_odd_ones", lambda stored: []
    )  # which would reach every folder of so small a store
    raw = json.loads((line / "params.yaml").read_text())
    raw["gates"]["training"]["probe_rows"] = 1
    (line / "params.yaml").write_text(json.dumps(raw))
    told = [c.expected for c in judge(monkeypatch, "training").checks if c.table == "slots"]
    assert any(f"{folders - 2} of {folders} folders, chosen by a hash, went unprobed" in t for t in told)


def test_one_folder_with_a_normed_last_state_is_refused_and_named(line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.functional as F

    honest, calls = extract.capture_rows, iter(range(100))

    def one_normed(target, rows, points, tokens):  # type: ignore[no-untyped-def]
        wrong = next(calls) == 2
        for states in honest(target, rows, points, tokens):
            states = states.clone()
            if wrong:
                states[:, -1] = F.rms_norm(states[:, -1].float(), (tiny.HIDDEN,), target.norm).to(states)
            yield states

    monkeypatch.setattr(extract, "capture_rows", one_normed)
    capture(monkeypatch)
    found = failed(judge(monkeypatch, "training"))
    name = MergedManifest.read(MERGED_MANIFEST).folders[2].name
    assert f"{name}: after the final norm" in found["the last state was taken before the final norm"]


def test_one_flipped_byte_is_refused_and_its_folder_named(line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(monkeypatch)
    path = line / HIDDEN_STATES / "rows_6-12" / "rows.safetensors"
    path.chmod(0o644)
    whole = bytearray(path.read_bytes())
    whole[5000] ^= 1
    os.unlink(path)
    path.write_bytes(whole)
    found = failed(judge(monkeypatch, "training"))
    assert "rows_6-12" in found["rows.safetensors holds the bytes that were written"]


def test_a_folder_cut_short_is_refused_and_named_not_a_traceback(line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(monkeypatch)
    path = line / HIDDEN_STATES / "rows_6-12" / "rows.safetensors"
    whole = path.read_bytes()
    os.unlink(path)
    path.write_bytes(whole[: len(whole) // 2])
    found = failed(judge(monkeypatch, "training"))
    assert (
        "rows_6-12" in found["the folder opens as its config says"]
        and "cut off" in found["the folder opens as its config says"]
    )
    assert "6 of 32 rows" in found["every prepared row was captured, once"]


def test_a_row_of_which_a_part_is_another_rows_is_refused_and_its_folder_named(
    line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fifths of each row in one folder: no median sees it."""
    honest, calls = extract.capture_rows, iter(range(100))

    def one_torn(target, rows, points, tokens):  # type: ignore[no-untyped-def]
        torn = next(calls) == 1
        for states in honest(target, rows, points, tokens):
            cut = len(states) * 3 // 5
            yield torch.cat([states[:cut], states[: len(states) - cut]]) if torn else states

    monkeypatch.setattr(extract, "capture_rows", one_torn)
    capture(monkeypatch)
    found = failed(judge(monkeypatch, "training"))
    words = found.pop("no part of a row lies farther from the target run again than precision explains")
    assert "rows_6-12 slot 0: 99 of 100 positions keep to" in words and "rows_0-6" not in words
    assert "precision explains 0.008" in words and "Part of a row holds states that are not this row's: tokens" in words


def test_one_rows_states_under_another_rows_tokens_are_refused_and_both_named(
    line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, kept = extract.capture_rows, {}

    def copied(target, rows, points, tokens):  # type: ignore[no-untyped-def]
        for states in honest(target, rows, points, tokens):
            yield kept.setdefault(len(states), states)

    monkeypatch.setattr(extract, "capture_rows", copied)
    capture(monkeypatch)
    found = failed(judge(monkeypatch, "training"))
    assert re.search(r"[0-9a-f]{24}: [0-9a-f]{24}", found["no two rows of other tokens have the same states"])
    words = found["no part of a row lies farther from the target run again than precision explains"]
    assert re.search(
        r"row [0-9a-f]{24}: A row holds another row's states: the states of rows_\d+-\d+ \([0-9a-f]{24}\)", words
    )


def test_a_normed_last_state_is_refused(line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.functional as F

    honest = extract.capture_rows

    def normed(target, rows, points, tokens):  # type: ignore[no-untyped-def]
        for states in honest(target, rows, points, tokens):
            states = states.clone()
            states[:, -1] = F.rms_norm(states[:, -1].float(), (tiny.HIDDEN,), target.norm).to(states)
            yield states

    monkeypatch.setattr(extract, "capture_rows", normed)
    capture(monkeypatch)
    found = failed(judge(monkeypatch, "training"))
    assert "after the final norm" in found["the last state was taken before the final norm"]


def test_an_edited_row_is_refused_before_extraction(
    line: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq

    path = line / "data/prepared/code/rows.parquet"
    rows = pq.read_table(path)
    pq.write_table(rows.slice(1), path)
    found = failed(judge(monkeypatch, "extraction"))
    assert set(found) == {
        "every file holds the bytes that prepared.json recorded",
        "rows in the file are as many as recorded",
        "supervised tokens are as many as recorded",
    }
    assert "13 against 14" in found["rows in the file are as many as recorded"]
    shown = capsys.readouterr().out
    assert "failed: sources: rows in the file are as many as recorded" in shown and "do:" in shown
    assert "Refused before GPU hours" in PAGE.read_text()


@pytest.mark.parametrize("arguments", [[], ["release"], ["training", "extraction"]])
def test_the_selector_names_the_gates_there_are(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gate", *arguments])
    with pytest.raises(LineError, match="one of extraction, training, deployment"):
        gate.main()


@pytest.mark.parametrize(
    "file", ["prepared/code/rows.parquet", "merged/index.parquet", "merged/vocabulary.safetensors"]
)
@pytest.mark.parametrize("at", [9, 1000, -3])
def test_a_damaged_file_is_named_and_the_report_of_before_does_not_stand(
    line: Path, monkeypatch: pytest.MonkeyPatch, file: str, at: int
) -> None:
    capture(monkeypatch)
    assert failed(judge(monkeypatch, "training")) == {}
    path = line / "data" / file
    whole = bytearray(path.read_bytes())
    whole[at] ^= 0x41
    path.write_bytes(whole)
    with pytest.raises(DataError, match="not the one that its manifest speaks of") as error:
        judge(monkeypatch, "training")
    assert error.value.where == f"data/{file}" and "dvc repro" in error.value.do
    assert not report_path("training").exists()


@pytest.mark.parametrize("at", range(4, 12000, 700))
def test_a_flipped_byte_of_prepared_rows_is_refused_or_named_at_extraction(
    line: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    path = line / "data/prepared/code/rows.parquet"
    whole = bytearray(path.read_bytes())
    whole[at % len(whole)] ^= 0x20
    path.write_bytes(whole)
    try:
        found = failed(judge(monkeypatch, "extraction"))
    except DataError as error:
        assert error.where == "data/prepared/code/rows.parquet" and not report_path("extraction").exists()
    else:
        assert "code/rows.parquet" in found["every file holds the bytes that prepared.json recorded"]


def write_draft(root: Path) -> None:
    """A draft of the tiny target and all that is said of it, made up but in step."""
    from safetensors.torch import save_file

    identity = identify_target(root / "target", "tiny")
    V = identity.vocab_size
    shapes = dict(passing.SHAPES) | {"lm_head.weight": [V, tiny.HIDDEN]}
    tensors = {n: torch.randn(*s, generator=torch.Generator().manual_seed(1)) for n, s in shapes.items()}
    (root / DRAFT).mkdir(parents=True)
    (root / "reports").mkdir(exist_ok=True)
    (root / DRAFT / "config.json").write_text(json.dumps(passing.CONFIG | {"vocab_size": V, "draft_vocab_size": V}))
    extra = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    save_file(tensors | extra, root / DRAFT / "model.safetensors")
    merged = MergedManifest.read(MERGED_MANIFEST)
    record = passing.record().model_copy(
        update={
            "target": identity,
            "capture": merged.capture,
            "merged_digest": merged.digest(),
            "gate_training_digest": GateReport.read(report_path("training")).digest(),
            "draft_vocab_size": V,
            "weights_digest": file_digest(root / DRAFT / "model.safetensors"),
            "config_digest": file_digest(root / DRAFT / "config.json"),
        }
    )
    record.write(root / DRAFT / DRAFT_RECORD)
    named = {"draft_digest": record.digest()}
    passing.deployment_evidence().train.model_copy(update=named).write(root / TRAIN_METRICS)
    by_domain = {d: passing.accept(1.7) for d in ("coding", "agentic", "general")}
    passing.serve().model_copy(update={**named, "served_by_domain": by_domain}).write(root / SERVE_EVIDENCE)
    policy = passing.policy().model_copy(update=named)
    policy.write(root / POLICY)
    benchmark = passing.benchmark().model_copy(update={**named, "policy_digest": policy.digest()})
    benchmark.write(root / BENCHMARK_EVIDENCE)


def test_a_draft_in_step_passes_and_its_page_is_written_then_faults_are_refused(
    line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(monkeypatch)
    judge(monkeypatch, "training")
    write_draft(line)
    report = judge(monkeypatch, "deployment")
    assert failed(report) == {} and "Fit to serve" in PAGE.read_text()
    assert report.subject_digest == DraftRecord.read(line / DRAFT / DRAFT_RECORD).digest()
    assert report.evidence == {
        str(f): file_digest(f) for f in (TRAIN_METRICS, SERVE_EVIDENCE, BENCHMARK_EVIDENCE, POLICY)
    }

    path = line / DRAFT / "config.json"
    good, config = path.read_text(), json.loads(path.read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]
    path.write_text(json.dumps(config))
    found = failed(judge(monkeypatch, "deployment"))
    assert "config.json: sha256:" in found["evidence, draft, data and target are links of one chain"]
    assert (
        "points that the engine makes of the layer ids"
        in found["config.json makes the engine feed and read what was trained"]
    )
    path.write_text(good)

    for broken in ("{", "[]", '{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, null, 3]}}'):
        path.write_text(broken)
        with pytest.raises(DataError, match=r"config.json cannot be read"):
            judge(monkeypatch, "deployment")
        assert not report_path("deployment").exists()
    path.write_text(good)

    weights = (line / DRAFT / "model.safetensors").read_bytes()
    (line / DRAFT / "model.safetensors").write_bytes(weights[:8] + b"}" + weights[9:])
    with pytest.raises(DataError, match="weights cannot be read"):
        judge(monkeypatch, "deployment")
    (line / DRAFT / "model.safetensors").write_bytes(weights)

    (line / "releases/abc").mkdir(parents=True)
    passing.release().model_copy(update={"accept_length": 1.9}).write(line / "releases/abc/release.json")
    (line / "releases/current.json").write_text('{"release": "abc"}')
    found = failed(judge(monkeypatch, "deployment"))
    assert [f for f in found if "last release's" in f] and "1.600 against 1.900" in next(iter(found.values()))
    assert "Refused before production" in PAGE.read_text()
    (line / "releases/current.json").write_text('{"release": ')
    with pytest.raises(DataError, match="pointer cannot be read"):
        judge(monkeypatch, "deployment")
