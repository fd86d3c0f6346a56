"""SpecForge's and speculators' own EAGLE-3 training over rows that were handed over: their loss at given weights is the one that
our own mathematics gives for the rows of our store, and their optimizer brings it down.

The expectation is computed in float64 from the merged rows themselves (tests/drafts/reference.py), never from what was handed over,
so an auxiliary state in another slot, a last state before the wrong norm, a mask or a token one position off shows in it. What the
peers do otherwise is theirs: SpecForge supervises by l[p] (and wants the target's best token in the draft vocabulary) and averages
over all positions, speculators by l[p+1] over supervised ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages import hand_over
from stages.capture.store import RowStore
from stages.contracts.adoption import HandOver
from stages.contracts.manifest import MERGED
from stages.drafts.eagle3 import Eagle3, Eagle3Config
from stages.targets import load_norm
from tests import tiny
from tests.bridges.peer_trainers import DECAY, DRAFT_STEPS, OPTIMIZER_STEPS, shortest
from tests.bridges.test_peers import PEERS
from tests.drafts.reference import Chain, make_draft, rms
from tests.test_hand_over import lay

pytestmark = pytest.mark.slow
RUNNER = Path(__file__).with_name("peer_trainers.py")
TOLERANCE = 1e-5  # relative: float32 beside float64; a mask one position off moves the least of them by 5e-5
VERSIONS = {"specforge": "specforge-0.2.0", "speculators": "speculators-0.9.0"}


class Given(NamedTuple):
    """A merged tiny line in `root`, a draft of random weights [float64], the target's head [V, H], norm and its eps, the target ids
    of the draft vocabulary."""

    root: Path
    draft: Eagle3
    head: Tensor
    norm: Tensor
    eps: float
    target_ids: Tensor


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    root = tmp_path_factory.mktemp("line")
    lay(root)
    d2t = load_file(root / MERGED / "vocabulary.safetensors")["d2t"]
    weights = load_file(root / "target" / "model.safetensors")
    vocab = weights["lm_head.weight"].shape[0]
    config = Eagle3Config(
        hidden_size=tiny.HIDDEN,
        intermediate_size=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=vocab,
        draft_vocab_size=len(d2t),
        eps=1e-5,
        rope_theta=10000.0,
        max_positions=512,
    )
    draft = make_draft(config=config)
    with torch.no_grad():  # small enough to learn from in a few steps
        for parameter in draft.parameters():
            parameter.copy_((parameter.float() * 0.5).double() if parameter.dim() > 1 else parameter.float().double())
        draft.embedding.copy_(weights["model.embed_tokens.weight"].double())
    norm, eps = load_norm(root / "target")
    return Given(root, draft, weights["lm_head.weight"].double(), norm.double(), eps, d2t + torch.arange(len(d2t)))


@pytest.fixture(autouse=True)
def here(given: Given, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(given.root)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Stored(NamedTuple):
    """A training row as our store holds it: tokens and mask as lists, states [L, 4, H] in float64."""

    tokens: list[int]
    mask: list[int]
    states: Tensor


def training_rows() -> list[Stored]:
    store = RowStore()
    index = pq.read_table(MERGED / "index.parquet").to_pylist()
    rows = [store.row(r["folder"], r["row_in_folder"]) for r in index if r["split"] == "train"]
    found = [Stored(ids.tolist(), mask.tolist(), states.double()) for states, ids, mask in rows]
    return shortest(found, lambda row: row.tokens)


Chains = list[list[Tensor]]


@torch.no_grad()
def chains(draft: Eagle3, row: Stored) -> Chains:
    """Of every position the draft's logits at each draft step that stays within the row."""
    trunk, fc = Chain(draft), draft.fc.weight.double()
    aux = row.states[:, :3].flatten(1)
    fed = [trunk(token, fc @ aux[p], p) for p, token in enumerate(row.tokens[1:])]
    said: list[list[Tensor]] = []
    for p, h in enumerate(fed):
        branch = Chain(draft)
        branch.keys, branch.values = trunk.keys[: p + 1], trunk.values[: p + 1]
        steps = [branch.logits(h)]
        for i in range(1, DRAFT_STEPS):
            if p + 1 + i < len(row.tokens):
                h = branch(row.tokens[p + 1 + i], h, p + i)
                steps.append(branch.logits(h))
        said.append(steps)
    return said


def specforge_loss(given: Given, rows: list[Stored], said: list[Chains]) -> float:
    """Cross-entropy with the target at p+1+i, where l[p+i] is set and the target's best token can be drafted; mean over all positions
    of the padded batch."""
    in_draft = set(given.target_ids.tolist())
    total = [0.0] * DRAFT_STEPS
    for row, drafted in zip(rows, said, strict=True):
        last = (
            torch.stack([rms(y, given.norm, given.eps) for y in row.states[:, 3].float().double()]).bfloat16().double()
        )
        target = last @ given.head.T
        for p, steps in enumerate(drafted):
            for i, z in enumerate(steps):
                at = p + i
                if at + 1 < len(row.tokens) and row.mask[at] and int(target[at + 1].argmax()) in in_draft:
                    chance = target[at + 1][given.target_ids].softmax(0)
                    total[i] -= float(chance @ z.log_softmax(0))
    positions = len(rows) * max(len(row.tokens) for row in rows)
    return sum(DECAY**i * t / positions for i, t in enumerate(total))


def speculators_loss(given: Given, rows: list[Stored], said: list[Chains]) -> float:
    """KL from the target at p+1+i, where l[p+1+i] is set; mean over those of each step."""
    total, count = [0.0] * DRAFT_STEPS, [0] * DRAFT_STEPS
    for row, drafted in zip(rows, said, strict=True):
        for p, steps in enumerate(drafted):
            for i, z in enumerate(steps):
                at = p + 1 + i
                if row.mask[at]:
                    wanted = (given.head[given.target_ids] @ rms(row.states[at, 3], given.norm, given.eps)).log_softmax(
                        0
                    )
                    total[i] += float(wanted.exp() @ (wanted - z.log_softmax(0)))
                    count[i] += 1
    return sum(DECAY**i * t / n for i, (t, n) in enumerate(zip(total, count, strict=True)))


def train(given: Given, peer: str) -> list[float]:
    """The peer's losses over what `hand_over` writes for it; the first is at the given weights."""
    if not (PEERS / VERSIONS[peer]).is_dir():
        pytest.skip(
            f"{VERSIONS[peer]} is not there: `make peers`, or unpack it below the folder that DRAFTLINE_PEERS names"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hand_over", peer, peer])
        hand_over.main()
    told = HandOver.read(HandOver.path(Path(peer))).how_to_train
    ratio = told.split("--train-data-ratio ")[1].split()[0] if peer == "speculators" else "1"
    tensors = {f"draft.{n}": p.detach().float().contiguous() for n, p in given.draft.named_parameters()}
    tensors |= {"embedding": given.draft.embedding.float(), "head": given.head.float(), "norm": given.norm.float()}
    c = dataclasses.asdict(given.draft.config)
    sizes = {
        "num_attention_heads": c["heads"],
        "num_key_value_heads": c["kv_heads"],
        "rms_norm_eps": c["eps"],
        "max_position_embeddings": c["max_positions"],
    } | {
        n: c[n]
        for n in ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "draft_vocab_size", "rope_theta")
    }
    save_file(
        {n: t.clone().contiguous() for n, t in tensors.items()}, "start.safetensors", {"sizes": json.dumps(sizes)}
    )
    path = os.pathsep.join(str(p) for p in (PEERS / VERSIONS[peer], PEERS / "deps"))
    ran = subprocess.run(
        [sys.executable, str(RUNNER), peer, peer, "start.safetensors", ratio],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("peer", VERSIONS)
def test_their_loss_on_handed_over_rows_is_ours_and_their_optimizer_brings_it_down(given: Given, peer: str) -> None:
    losses = train(given, peer)
    rows, loss = training_rows(), specforge_loss if peer == "specforge" else speculators_loss
    said = [chains(given.draft, row) for row in rows]
    assert len(losses) == OPTIMIZER_STEPS and losses[0] == pytest.approx(loss(given, rows, said), rel=TOLERANCE)
    assert all(b < a for a, b in pairwise(losses)) and losses[-1] < 0.98 * losses[0], losses
    shifted = loss(given, [row._replace(mask=[*row.mask[1:], 0]) for row in rows], said)
    swapped = [row._replace(states=row.states[:, [1, 0, 2, 3]]) for row in rows]
    for wrong in (shifted, loss(given, swapped, [chains(given.draft, row) for row in swapped])):
        assert abs(wrong - losses[0]) > 4 * TOLERANCE * losses[0], (
            "this comparison could not tell a swapped slot or a shifted mask"
        )
