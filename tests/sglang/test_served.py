"""SGLang itself serves the line's draft: the same stage, the same evidence, the same counts; wrong layers named; nothing left behind.

Four starts and some broken off.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
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
from stages.contracts.evidence import SERVE_EVIDENCE, ParitySlot, ServeEvidence
from stages.contracts.manifest import HIDDEN_STATES, PREPARED_MANIFEST, CaptureManifest, PreparedManifest
from stages.contracts.params import load_params
from stages.engines._sglang_process import members
from tests.sglang.conftest import ROOT, set_params

pytestmark = pytest.mark.sglang
POINTS = [3, 16, 28]


def test_the_server_is_fed_stays_lossless_and_counts_as_this_process_and_the_simulation_do(here: Path) -> None:
    in_process = ServeEvidence.read(SERVE_EVIDENCE)
    serve_validate.main()
    evidence = ServeEvidence.read(SERVE_EVIDENCE)
    assert (evidence.engine, evidence.engine_version) == ("sglang", "sglang 0.5.23")
    assert [s.nearest_point for s in evidence.parity] == POINTS == [s.claimed_point for s in evidence.parity]
    assert evidence.parity_words == "as claimed"
    for slot in evidence.parity:
        assert slot.claimed_distance < 1e-4 < 0.1 < slot.next_best_distance and slot.rows == 3
    greedy = evidence.greedy
    assert greedy.identical + greedy.near_ties == greedy.requests == len(evidence.requests) >= 4
    compared = [r for r in evidence.requests if r.simulated_verifications is not None]
    assert len(compared) >= len(evidence.requests) - greedy.near_ties
    assert [r.verifications for r in compared] == [r.simulated_verifications for r in compared]
    assert evidence.served.accept_length > 1.0, "a draft that is never right would agree with anything"
    mine = {r.prompt_id: r.accepted for r in in_process.requests}
    assert {r.prompt_id: r.accepted for r in evidence.requests} == mine
    assert evidence.served == in_process.served and evidence.served_by_domain == in_process.served_by_domain
    assert not servers()


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
    here: Path, capfd: pytest.CaptureFixture[str], ids: tuple[int, ...], fed: list[int], words: str
) -> None:
    set_layer_ids(*ids)
    parity, said = served_parity()
    assert [s.nearest_point for s in parity] == fed and [s.claimed_point for s in parity] == POINTS
    assert words in said
    assert all(s.distance < 1e-4 < s.claimed_distance for s in parity)
    assert f"makes this engine feed points {fed}, and it was trained on {POINTS}" in capfd.readouterr().err


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


OWNER = """
import sys
from pathlib import Path
from stages.contracts.params import load_params
from stages.engines.sglang import Launch, serve
from stages.targets import locate_target
params = load_params()
launch = Launch(locate_target(params.target.origin), "cpu", "float32", 2, 4, 64)
with serve(launch, params.serve.sglang, label="killed") as server:
    print("ready", flush=True)
    server.generate([], concurrency=1)
    sys.stdin.read()
"""


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


@pytest.mark.parametrize("after_s", [0.3, 2.0, 6.0, 15.0, None])
def test_kill_9_of_the_owner_leaves_no_server(here: Path, after_s: float | None) -> None:
    """At four moments of the start, and when it serves."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert owner.stdout is not None
    if after_s is None:
        assert owner.stdout.readline() == b"ready\n"
    else:
        deadline = time.monotonic() + 60
        while not servers() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(after_s)
    running = servers()
    assert running
    groups = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[2]) for pid in running}
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and (servers() or any(members(g) for g in groups)):
        time.sleep(0.1)
    assert servers() == [] and not any(members(g) for g in groups)
