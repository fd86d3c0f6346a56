"""The fault this line exists for, on the real target: trained on points 3, 16, 28 and fed something else.

Everything is real but small: SmolLM2, a few dozen prompts, a draft of a few steps. Shapes are right in every case, the
greedy output is too; the gates must see the layers by value and name them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from stages import benchmark, extract, gate, merge, prepare, serve_validate, train
from stages.contracts.draft import DRAFT
from stages.contracts.errors import Refusal
from stages.contracts.evidence import SERVE_EVIDENCE, ServeEvidence
from stages.contracts.report import GateName, GateReport, report_path
from stages.reporting.page import PAGE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FED = "the engine feeds the draft the points that it was trained on"
NEAREST = "of all the target's points, the nearest is the claimed one"


def write_params(root: Path) -> None:
    """The default parameters cut to about a minute."""
    params = yaml.safe_load((ROOT / "params/smollm2-135m.yaml").read_text())
    for source, limit in zip(params["prepare"]["sources"], (4, 14, 5, 5), strict=True):
        source["limit"] = limit
    params["prepare"] |= {"max_new_tokens": 16, "workers": 1, "held_out_share": 0.25, "out_of_distribution": 2}
    params["train"] |= {"optimizer_steps": 12, "evaluate_every": 12, "checkpoint_every": 12}
    params["serve"] |= {"prompts_per_source": 2, "max_new_tokens": 12, "sampling_prompts": 0, "parity_rows": 3}
    params["benchmark"] |= {
        "concurrencies": [1],
        "max_prompt_tokens": 320,
        "draft_steps": [1],
        "max_new_tokens": 6,
        "repeats": 3,
        "out_of_distribution_prompts": 0,
    }
    params["gates"]["extraction"] |= {
        "min_rows": 10, "min_held_out_rows": 1, "min_supervised_tokens": 100, "max_capped_share": 1.0, "max_reject_share": 1.0,
    }  # fmt: skip
    params["gates"]["training"] |= {"probe_rows": 3, "min_train_coverage": 0.5, "min_held_out_coverage": 0.5}
    (root / "params.yaml").write_text(json.dumps(params))


def judge(name: GateName) -> dict[str, str]:
    """Run a gate here; the words of the checks that failed, by assertion."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gate", name])
        try:
            gate.main()
        except Refusal as refusal:
            assert not GateReport.read(report_path(name)).success, refusal
    checks = GateReport.read(report_path(name)).checks
    return {c.assertion: "\n".join([c.actual, *c.failing]) for c in checks if not c.success}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real line, in a folder of its own; the converted target is the clone's, when it is there."""
    root = tmp_path_factory.mktemp("real")
    if (ROOT / ".cache/targets").exists():
        shutil.copytree(ROOT / ".cache/targets", root / ".cache/targets", copy_function=os.link)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_params(root)
        prepare.main()
        assert judge("extraction") == {}
        extract.main()
        merge.main()
        assert judge("training") == {}
        train.main()
        serve_validate.main()
        benchmark.main()
    torch.set_num_threads(threads)
    return root


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "real"
    shutil.copytree(trained, copy, copy_function=os.link)  # stages write aside and rename, so the fixture's files stay
    monkeypatch.chdir(copy)
    return copy


def serve_with(*ids: int) -> None:
    """Serve the draft after its config.json was given other layer ids (SGLang's meaning: id i is point i+1)."""
    path = DRAFT / "config.json"
    config = json.loads(path.read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(ids)
    path.unlink()  # a hard link: the fixture's own file must stay as it is
    path.write_text(json.dumps(config))
    serve_validate.main()


def test_served_as_trained_parity_passes(here: Path) -> None:
    serve_with(2, 15, 27)
    assert FED not in judge("deployment")


@pytest.mark.parametrize(
    ("ids", "fed", "words"),
    [
        ((-1, 2, 15), [0, 3, 16], "the embedding was put first and the last point dropped"),
        ((3, 16, 28), [4, 17, 29], "every slot is shifted by +1 layer"),
    ],
)
def test_a_draft_fed_other_layers_is_refused_before_deployment_and_they_are_named(
    here: Path, ids: tuple[int, ...], fed: list[int], words: str
) -> None:
    serve_with(*ids)
    evidence = ServeEvidence.read(SERVE_EVIDENCE)
    assert [s.nearest_point for s in evidence.parity] == fed and [s.claimed_point for s in evidence.parity] == [
        3,
        16,
        28,
    ]
    assert evidence.greedy.identical + evidence.greedy.near_ties == evidence.greedy.requests, (
        "losslessness cannot see it"
    )
    assert words in judge("deployment")[FED]
    assert words in PAGE.read_text()


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ((0, 3, 16), "the embedding was put first and the last point dropped"),
        ((4, 17, 29), "every slot is shifted by +1 layer"),
    ],
)
def test_the_same_fault_in_stored_states_is_refused_before_training(
    here: Path, monkeypatch: pytest.MonkeyPatch, points: tuple[int, ...], words: str
) -> None:
    shutil.rmtree(".cache/states")
    shutil.rmtree(extract.HIDDEN_STATES)  # extract would take good folders from here again
    honest = extract.capture_rows
    monkeypatch.setattr(extract, "capture_rows", lambda target, rows, _, tokens: honest(target, rows, points, tokens))
    extract.main()
    merge.main()
    draft = {p.name: p.read_bytes() for p in DRAFT.iterdir()}
    assert words in judge("training")[NEAREST]
    with pytest.raises(Refusal, match="gate-training refused this"):
        train.main()
    assert {p.name: p.read_bytes() for p in DRAFT.iterdir()} == draft
