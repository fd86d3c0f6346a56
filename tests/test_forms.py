"""Smaller forms of stored states through the line: gate-training passes, and training gives the very draft, or nearly."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from stages import extract, gate, merge, train
from stages.capture.store import RowStore
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import TRAIN_METRICS, TrainMetrics
from stages.contracts.manifest import HIDDEN_STATES, StoredForm
from stages.contracts.report import GateReport, report_path
from stages.drafts.eagle3 import look_ahead, start_draft
from stages.targets import load_target
from tests import line, tiny

FORMS = {
    "default": {},
    "leaving out": {"store_tokens": "to_last_supervised", "store_last": "before_supervised"},
    "float8": {"store_aux": "float8_e4m3"},
}


def lay(root: Path, form: dict[str, str]) -> None:
    """Prepared rows and params; thresholds of a random target's wit are open."""
    target = tiny.make_target(root / "target")
    prepared = line.write_prepared(root, target)
    line.write_gate_report(root, "extraction", prepared.digest())
    path = line.write_params(root, target, {"capture": form})
    params = json.loads(path.read_text())
    params["gates"]["training"]["min_argmax_agreement"] = 0.5
    path.write_text(json.dumps(params))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gate", "training"])
    return tmp_path


def test_the_loss_and_its_gradients_look_at_nothing_that_is_left_out(here: Path) -> None:
    lay(here, {})
    extract.main()
    merge.main()
    target = load_target(here / "target")
    sizes = {"heads": tiny.HEADS, "kv_heads": tiny.KV_HEADS, "head_dim": tiny.HEAD_DIM}
    found: list[tuple[torch.Tensor, ...]] = []
    for form in ({}, FORMS["leaving out"]):
        lay(here, form)
        extract.main()
        draft, teacher = start_draft(
            target, torch.arange(target.config.vocab_size), **sizes, intermediate_size=tiny.INTER, seed=1
        )
        rows = train.read_rows(RowStore(), target.device)  # the index leads to equal places in every form
        batch = rows.pack(rows.train[:8])
        ahead = look_ahead(draft, teacher, batch, steps=4, decay=0.8)
        ahead.loss.backward()
        found.append((ahead.loss.detach(), *(p.grad for p in draft.parameters() if p.grad is not None)))
        stored = RowStore().manifest().capture.form
    assert stored == StoredForm(tokens="to_last_supervised", last="before_supervised")
    assert len(found[0]) > 5 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_the_gate_passes_every_form_and_training_gives_the_same_draft_or_nearly(here: Path) -> None:
    weights: dict[str, str] = {}
    metrics: dict[str, TrainMetrics] = {}
    for name, form in FORMS.items():
        lay(here, form)
        extract.main()
        merge.main()
        gate.main()
        assert GateReport.read(report_path("training")).success, name
        train.main()
        weights[name] = DraftRecord.read(DRAFT / DRAFT_RECORD).weights_digest
        metrics[name] = TrainMetrics.read(TRAIN_METRICS)
    assert weights["leaving out"] == weights["default"] != weights["float8"]
    assert metrics["leaving out"].overall == metrics["default"].overall
    assert metrics["float8"].held_out_loss == pytest.approx(metrics["default"].held_out_loss, rel=0.05)


@pytest.mark.slow
def test_another_layer_in_a_smaller_form_is_still_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = extract.capture_rows
    monkeypatch.setattr(
        extract, "capture_rows", lambda target, rows, points, n: honest(target, rows, [p + 1 for p in points], n)
    )
    for form in (FORMS["leaving out"], FORMS["float8"]):
        shutil.rmtree(HIDDEN_STATES, ignore_errors=True)
        lay(here, form)
        extract.main()
        merge.main()
        with pytest.raises(gate.Refusal, match="the nearest is the claimed one"):
            gate.main()
