"""The peers of the training benchmark: told in words when they are absent; the same draft as ours when they are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training_peers import absent
from tests.drafts.reference import CHOICES

SAME_LOGITS = """
import sys, torch
from dataclasses import replace
from benchmarks.training_peers import SpecForge, Speculators
from stages.drafts._training import chain_states, lay_out
from tests.drafts.reference import CONFIG, make_batch, make_draft, make_teacher

STEPS, LENGTH = 3, 9
draft, teacher = make_draft(dtype=torch.float32, norms=tuple(sys.argv[2:])), make_teacher(dtype=torch.float32)
batch = make_batch(["1" * LENGTH], dtype=torch.float32)

class Inputs:
    config = replace(CONFIG, norms=draft.config.norms)
    def tensor(self, name):
        t2d = torch.zeros(CONFIG.vocab_size, dtype=torch.bool)
        t2d[teacher.target_ids] = True
        head = torch.zeros(CONFIG.vocab_size, CONFIG.hidden_size)
        head[t2d] = teacher.head
        d2t = teacher.target_ids - torch.arange(len(teacher.target_ids))
        return {"t2d": t2d, "d2t": d2t, "head": head, "norm": teacher.norm, "embedding": draft.embedding}[name].clone()

arm = {"specforge": SpecForge, "speculators": Speculators}[sys.argv[1]](Inputs(), STEPS, 1)
assert arm.weights().keys() == draft.state_dict().keys()
own = arm._draft.state_dict()
for name, weight in draft.state_dict().items():
    own.get(name, own.get(name.replace("midlayer.", "layers.0."))).copy_(weight)
logits = []
arm._draft.lm_head.register_forward_hook(lambda module, given, out: logits.append(out.detach()[0]))
arm.step(batch, 0.0)
layout = lay_out(batch.loss_mask, batch.lengths, STEPS)
assert len(logits) == STEPS
for ours, roots, theirs in zip(chain_states(draft, batch, layout), layout.roots, logits):
    torch.testing.assert_close(draft.draft_logits(ours), theirs[roots], rtol=1e-4, atol=1e-4)
print("same logits")
"""


def test_an_absent_peer_is_told_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTLINE_PEERS", str(tmp_path))
    assert absent("speculators") == (
        f"speculators: not run, for {tmp_path}/speculators-0.9.0 and {tmp_path}/deps is not there"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "norms"),
    [("specforge", ()), ("specforge", ("fc_norm",)), *(("speculators", norms) for norms in CHOICES)],
)
def test_every_draft_step_of_a_peer_gives_our_logits_from_our_weights(peer: str, norms: tuple[str, ...]) -> None:
    if why := absent(peer):
        pytest.skip(why)
    told = subprocess.run(
        [sys.executable, "-c", SAME_LOGITS, peer, *norms],
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    assert "same logits" in told.stdout
