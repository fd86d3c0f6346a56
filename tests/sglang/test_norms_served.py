"""A draft with EAGLE-3.1's norms in SGLang itself: fed, accepted and counted as in this process. Two servers are started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stages import serve_validate, train
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import SERVE_EVIDENCE, ServeEvidence
from tests.sglang.conftest import set_params
from tests.unrounded import simulated_unrounded

pytestmark = pytest.mark.sglang


def test_a_draft_with_norms_is_served_with_the_counts_of_this_process(here: Path) -> None:
    set_params(here, train={"norms": ["fc_norm", "norm_output"]}, serve={"engine": "in_process"})
    train.main()
    assert DraftRecord.read(DRAFT / DRAFT_RECORD).norms == ("fc_norm", "norm_output")
    config = json.loads((DRAFT / "config.json").read_text())
    assert config["fc_norm"] is config["norm_output"] is True
    weights = load_file(DRAFT / "model.safetensors")
    assert min(float((weights[f"fc_norm.{i}.weight"] - 1).abs().max()) for i in range(3)) > 0.01, (
        "ones would hide a loss"
    )
    serve_validate.main()
    mine = ServeEvidence.read(SERVE_EVIDENCE)
    foretold = simulated_unrounded(mine)
    set_params(here, serve={"engine": "sglang"})
    serve_validate.main()
    evidence = ServeEvidence.read(SERVE_EVIDENCE)
    assert (mine.engine, evidence.engine_version) == ("in_process", "sglang 0.5.23")
    assert {r.prompt_id: r.accepted for r in evidence.requests} == {r.prompt_id: r.accepted for r in mine.requests}
    assert evidence.served == mine.served and evidence.served.accept_length > 1.0
    deeper = sum(accepted > 1 for r in evidence.requests for accepted in r.accepted)
    assert deeper >= 3, "what norm_output hands on shows from the second drafted token"
    compared = [r for r in evidence.requests if r.simulated_verifications is not None]
    assert {r.prompt_id: r.accepted for r in compared} == foretold and compared
    assert evidence.greedy.identical + evidence.greedy.near_ties == evidence.greedy.requests
