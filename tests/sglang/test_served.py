"""SGLang itself serves the line's draft: the same stage, the same evidence, the same counts; wrong layers named; nothing left behind.

Seven starts (one of them, the user's bug, and one its shift by one) and some broken off.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages import extract, serve_validate
from stages._served import open_served
from stages.acceptance.prompts import held_out_prompts
from stages.capture.store import RowStore
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import EngineError
from stages.contracts.evidence import (
    BENCHMARK_EVIDENCE,
    POLICY,
    SERVE_EVIDENCE,
    BenchmarkEvidence,
    ParitySlot,
    ServeEvidence,
    ServingPolicy,
)
from stages.contracts.manifest import HIDDEN_STATES, PREPARED_MANIFEST, CaptureManifest, PreparedManifest
from stages.contracts.params import load_params
from stages.engines._sglang_process import members
from stages.reporting.page import PAGE
from tests.sglang.conftest import ROOT, in_folder, set_params
from tests.test_users_bug import FED, judge
from tests.unrounded import simulated_unrounded

pytestmark = pytest.mark.sglang
POINTS = [3, 16, 28]


def test_the_server_is_fed_stays_lossless_and_counts_as_this_process_and_the_simulation_do(
    line: Path, served: Path
) -> None:
    in_process = ServeEvidence.read(line / SERVE_EVIDENCE)
    evidence = ServeEvidence.read(served / SERVE_EVIDENCE)
    assert (evidence.engine, evidence.engine_version) == ("sglang", "sglang 0.5.23")
    assert [s.nearest_point for s in evidence.parity] == POINTS == [s.claimed_point for s in evidence.parity]
    assert evidence.parity_words == "as claimed"
    for slot in evidence.parity:
        assert slot.claimed_distance < 1e-4 < 0.1 < slot.next_best_distance and slot.rows == 3
    greedy = evidence.greedy
    assert greedy.identical + greedy.near_ties == greedy.requests == len(evidence.requests) >= 4
    compared = [r for r in evidence.requests if r.simulated_verifications is not None]
    assert len(compared) >= len(evidence.requests) - greedy.near_ties
    with in_folder(line):
        assert {r.prompt_id: r.accepted for r in compared} == simulated_unrounded(in_process)
    assert sum(a.requests for a in evidence.served_by_length.values()) == len(evidence.requests)
    assert evidence.served.accept_length > 1.0, "a draft that is never right would agree with anything"
    mine = {r.prompt_id: r.accepted for r in in_process.requests}
    assert {r.prompt_id: r.accepted for r in evidence.requests} == mine
    assert evidence.served == in_process.served and evidence.served_by_domain == in_process.served_by_domain
    assert set(evidence.greedy_by_domain) == {"agentic", "coding", "general"}, (
        "agentic prompts are those that call tools"
    )
    token, string = evidence.stops
    assert (token.condition, string.condition) == ("token", "string") and token.inside_a_draft > 0
    for stops in evidence.stops:
        assert stops.plain_right == stops.drafted_right == stops.requests >= 3, stops.differing_prompt_ids


def test_both_servers_are_timed_alike_and_what_was_seen_is_told(served: Path) -> None:
    evidence, policy = BenchmarkEvidence.read(served / BENCHMARK_EVIDENCE), ServingPolicy.read(served / POLICY)
    assert (evidence.engine, evidence.engine_version) == (policy.engine, policy.engine_version)
    assert evidence.engine_version == "sglang 0.5.23" and evidence.device.startswith("cpu")
    measured = {(a.name, a.draft_steps, a.concurrency) for a in evidence.arms if a.name != "policy"}
    assert measured == {(n, k, c) for c in (1, 2) for n, k in (("plain", 0), ("speculative", 3))}
    for arm in evidence.arms:
        times = arm.latencies
        assert times is not None and len(arm.tokens_per_s) == 3 and min(arm.tokens_per_s) > 0
        assert 0 < times.first_token_ms.p50 <= times.whole_ms.p50 and 0 < times.per_token_ms.p50 < times.whole_ms.p50
        assert arm.accept_length == 1.0 if arm.name == "plain" else 1.0 <= arm.accept_length <= 4.0
    assert {(o.arm, o.rate_per_s, o.requests) for o in evidence.open_loop} == {
        ("plain", 2.0, 6), ("speculative", 2.0, 6),
    }  # fmt: skip
    assert [f.arm for f in evidence.first_requests] == ["plain", "speculative"]
    conditions = evidence.conditions
    assert conditions is not None and (conditions.engines, conditions.cache) == ("servers started", "off")
    assert conditions.settings_compared > 400 and conditions.cached_prompt_tokens == 0
    assert "SGLang on a CPU" in conditions.warnings[0]
    assert evidence.off_cost_ratio is None and conditions.policy_served_by == "an engine for each draft length"
    assert set(evidence.accept_length_by_domain) == {"agentic", "coding", "general"}
    assert evidence.out_of_distribution is not None and evidence.out_of_distribution.requests == 2


def test_the_gate_passes_a_sound_draft_on_what_sglang_did(there: Path) -> None:
    served = ServeEvidence.read(SERVE_EVIDENCE)
    low = {"min_accept_length": 1.02, "min_domain_accept_length": dict.fromkeys(served.served_by_domain, 1.0)}
    path = there / "params.yaml"
    params = json.loads(path.read_text())
    params["gates"]["deployment"] |= low
    path.unlink()
    path.write_text(json.dumps(params))
    refused = judge("deployment")
    # On a shared CPU a load's interval may lie below plain decoding; everything else is no matter of speed.
    assert set(refused) <= {"the serving policy is never slower than plain decoding"}, refused
    page = PAGE.read_text()
    assert "SGLang on a CPU" in page and "sglang 0.5.23" in page
    assert not servers()


@pytest.mark.parametrize(
    ("length", "says"),
    [(1.0, "the draft does something"), (4.0, "accept length is below its ceiling")],
    ids=["inert", "ceiling"],
)
def test_a_draft_that_does_nothing_or_everything_is_suspicious_and_never_passes(
    there: Path, length: float, says: str
) -> None:
    served = ServeEvidence.read(SERVE_EVIDENCE)
    found = served.served.model_copy(update={"accept_length": length})
    served.model_copy(update={"served": found}).write(SERVE_EVIDENCE)
    assert says in judge("deployment")


def set_layer_ids(*ids: int) -> None:
    path = DRAFT / "config.json"
    config = json.loads(path.read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(ids)
    path.unlink()  # a hard link: the fixture's own file must stay as it is
    path.write_text(json.dumps(config))


def served_parity() -> tuple[tuple[ParitySlot, ...], str]:
    """What serve-validate finds, of the server with the draft alone."""
    params, record = load_params(), DraftRecord.read(DRAFT / DRAFT_RECORD)
    served = open_served(params, record)
    prompts = held_out_prompts(PreparedManifest.read(PREPARED_MANIFEST), 1)
    requests = serve_validate.as_requests(served.engine, prompts, 8)
    fed: dict[str, list[Tensor]] = defaultdict(list)
    with served.open(4, max(len(r.prompt_ids) for r in requests) + 8, params.serve.draft_steps) as server:
        answers = server.generate(
            requests, concurrency=4, draft_steps=params.serve.draft_steps, observe=lambda p, _, aux: fed[p].append(aux)
        )
    return serve_validate.check_parity(served, prompts, answers, fed, record)


@pytest.mark.parametrize(
    ("ids", "fed", "words"),
    [
        ((-1, 2, 15), [0, 3, 16], "the embedding was put first and the last point dropped"),
        ((3, 16, 28), [4, 17, 29], "every slot is shifted by +1 layer"),
    ],
)
def test_a_draft_fed_other_layers_is_found_out_by_value_and_they_are_named(
    there: Path, capfd: pytest.CaptureFixture[str], ids: tuple[int, ...], fed: list[int], words: str
) -> None:
    """One server a fault: what it was fed takes the place of what the sound one was, and the gate sees it."""
    set_layer_ids(*ids)
    parity, said = served_parity()
    assert [s.nearest_point for s in parity] == fed and [s.claimed_point for s in parity] == POINTS
    assert words in said
    assert all(s.distance < 1e-4 < s.claimed_distance for s in parity)
    assert f"makes this engine feed points {fed}, and it was trained on {POINTS}" in capfd.readouterr().err
    ServeEvidence.read(SERVE_EVIDENCE).model_copy(update={"parity": parity, "parity_words": said}).write(SERVE_EVIDENCE)
    refusal = judge("deployment")[FED]
    assert words in refusal
    for point, place in zip(POINTS, fed, strict=True):
        assert f"trained on point {point}, fed point {place}" in refusal


def test_a_draft_without_its_head_is_refused_before_a_server_starts(here: Path) -> None:
    weights = DRAFT / "model.safetensors"
    tensors = load_file(weights)
    del tensors["lm_head.weight"]
    weights.unlink()
    save_file(tensors, weights)
    with pytest.raises(EngineError, match=r"lm_head\.weight is missing"):
        open_served(load_params(), DraftRecord.read(DRAFT / DRAFT_RECORD))
    assert not Path("logs").exists()


def test_states_extracted_by_the_server_are_those_extracted_here(here: Path) -> None:
    """All rows through both: the three points and the last state, which is computed from the highest of them."""
    mine = RowStore(HIDDEN_STATES)
    rows = {f.name: [mine.row(f.name, i)[0].clone() for i in range(f.end - f.start)] for f in mine.manifest().folders}
    set_params(here, capture={"engine": "sglang"})
    extract.main()
    theirs = RowStore(HIDDEN_STATES)
    manifest = CaptureManifest.read(HIDDEN_STATES / "data_config.json")
    assert manifest.capture.engine == "sglang 0.5.23" and manifest.rows == sum(map(len, rows.values())) > 10
    for name, states in rows.items():
        for i, one in enumerate(states):
            other = theirs.row(name, i)[0]
            assert one.shape == other.shape
            apart = (one.float() - other.float()).norm(dim=-1) / one.float().norm(dim=-1)
            assert apart[1:].median() <= 3e-3, f"{name} row {i}: {apart[1:].median():.2e}"
    assert not servers()


def servers() -> list[int]:
    """Processes of any SGLang server whose log is below the current folder."""
    here = Path.cwd()
    found: list[int] = []
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if cwd.resolve() == here and _is_server((cwd.parent / "cmdline").read_bytes()):
                found.append(int(cwd.parent.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


def _is_server(command: bytes) -> bool:
    return b".venv-sglang" in command or b"sglang::" in command


@pytest.mark.parametrize(
    ("stage", "moment"),
    [
        ("serve_validate", 0.3),
        ("serve_validate", 2.0),
        ("benchmark", 6.0),
        ("serve_validate", "logs/sglang/drafted-3.log"),
        ("benchmark", "logs/sglang/drafted-3.log"),
    ],
)
def test_kill_9_of_a_stage_leaves_no_server(there: Path, stage: str, moment: float | str) -> None:
    """At three moments of the start; while a server answers; and while two do."""
    with Path("owner.log").open("wb") as log:
        owner = subprocess.Popen(
            [sys.executable, "-m", f"stages.{stage}"],
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    until(lambda: bool(servers()), 120, owner)
    if isinstance(moment, float):
        time.sleep(moment)
    else:
        until(lambda: Path(moment).exists() and Path(moment).read_bytes().count(b"POST /generate") > 1, 300, owner)
    running = servers()
    assert running
    groups = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[2]) for pid in running}
    assert len(groups) == (2 if (stage, moment) == ("benchmark", "logs/sglang/drafted-3.log") else 1)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    until(lambda: not servers() and not any(members(g) for g in groups), 30)


def until(reached: Callable[[], bool], limit_s: float, owner: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline
        assert owner is None or owner.poll() is None, Path("owner.log").read_text()[-2000:]
        time.sleep(0.05)
