"""A promotion tells a real SGLang to take the new draft, looks at it, and puts the one before back when it falls short."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from safetensors.torch import load, save

from flows import promote as flow
from flows import release, serving
from stages._served import facts_for_server, served_points
from stages.acceptance.prompts import held_out_prompts
from stages.contracts.canary import CANARY, Canary, CanaryRequest
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.evidence import SERVE_EVIDENCE, ServeEvidence
from stages.contracts.manifest import PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import load_params
from stages.contracts.release import current
from stages.drafts.eagle3 import read_draft
from stages.engines import sglang
from stages.engines._sglang_launch import command, environment
from stages.targets import load_target, locate_target
from tests.flows.s3 import free_ports
from tests.flows.samples import write_draft
from tests.sglang import restart

pytestmark = pytest.mark.sglang
_REQUESTS = 6


@pytest.fixture
def clone(here: Path, tmp_path: Path) -> Iterator[Path]:
    """A clone whose promotions restart an SGLang server, and restart.json, which says how; the line's draft is in `here`."""
    port, root = free_ports(1)[0], tmp_path / "clone"
    params, record = load_params(), DraftRecord.read(DRAFT / DRAFT_RECORD)
    folder = locate_target(params.target.origin)
    target, checkpoint = load_target(folder, "cpu", "float32"), read_draft(DRAFT)
    points = served_points(sglang, checkpoint, record, target.config.layers)
    launch = sglang.Launch(
        target=folder, device="cpu", dtype="float32", threads=2, concurrency=1, positions=400,
        draft=facts_for_server(checkpoint, record, points, target), draft_steps=params.serve.draft_steps,
    )  # fmt: skip
    fields = launch.fields(params.serve.sglang) | {"speculative_draft_model_path": "@DRAFT@"}
    told = {
        "command": command(fields, params.serve.sglang.python, port),
        "env": environment("cpu", 2),
        "log": str(tmp_path / "sglang.log"),
        "pid": str(tmp_path / "server.pid"),
    }
    spec = tmp_path / "restart.json"
    spec.write_text(json.dumps(told))
    write_draft(root, b"none yet")  # the clone's params.yaml, and all that a draft stands on
    path = root / "params.yaml"
    changed = yaml.safe_load(path.read_text())
    changed["promotion"] |= {
        "restart_command": [sys.executable, restart.__file__, str(spec)],
        "server_url": f"http://127.0.0.1:{port}",
        "restart_limit_s": 300,
        "canary_max_loss": 0.02,
    }
    path.write_text(yaml.safe_dump(changed))
    try:
        yield root
    finally:
        restart.stop(Path(told["pid"]))


def put(root: Path, weights: bytes) -> Canary:
    """A draft of these weights that passed every gate, its canary requests those that the line's draft answered."""
    draft = write_draft(root, weights, config=(DRAFT / "config.json").read_bytes())
    served = ServeEvidence.read(SERVE_EVIDENCE)
    ids = {p.prompt_id: p.ids for p in held_out_prompts(PreparedManifest.read(PREPARED_MANIFEST))}
    canary = Canary(
        draft_digest=draft.digest(),
        engine="sglang",
        engine_version=sglang.VERSION,
        max_new_tokens=served.max_new_tokens,
        requests=tuple(
            CanaryRequest(prompt_id=r.prompt_id, ids=ids[r.prompt_id], tokens=r.tokens, verifications=r.verifications)
            for r in served.requests[:_REQUESTS]
        ),
    )
    canary.write(root / CANARY)
    return canary


def shuffled() -> bytes:
    """The line's draft with the rows of its head in another order: every shape is right, every value is another token's."""
    tensors = load((DRAFT / "model.safetensors").read_bytes())
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head[torch.randperm(len(head), generator=torch.Generator().manual_seed(1))].contiguous()
    return save(tensors)


def test_sglang_takes_the_promoted_draft_and_gets_the_one_before_back_when_the_new_one_falls_short(clone: Path) -> None:
    said: list[str] = []
    validated = put(clone, (DRAFT / "model.safetensors").read_bytes())
    assert validated.accept_length > 1.05, "the line's draft must be told from a broken one"
    words = flow.take_or_go_back(clone, release.promote(clone), said.append)
    good = current(clone)
    # In float32 SGLang accepts what was accepted when the draft was validated, token by token.
    assert words == (
        f"canary of {_REQUESTS} requests: accept length {validated.accept_length:.3f}, validated {validated.accept_length:.3f}"
    )

    put(clone, shuffled())
    with pytest.raises(serving.ServerFault, match="falls short of the release's own accept length") as told:
        flow.take_or_go_back(clone, release.promote(clone), said.append)
    assert f"validated {validated.accept_length:.3f}" in told.value.text()
    assert told.value.do == f"rolled back by itself to release {good}: {words}"
    assert current(clone) == good
    url = yaml.safe_load((clone / "params.yaml").read_text())["promotion"]["server_url"]
    info = httpx.get(f"{url}/server_info", timeout=30, trust_env=False).json()
    assert info["speculative_draft_model_path"] == str((clone / "releases" / str(good) / "draft").resolve())
    pid = clone.parent / "server.pid"
    group = int(pid.read_text())
    assert restart.left(group)
    restart.stop(pid)
    assert not restart.left(group)
