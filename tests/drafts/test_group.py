"""One step in pieces and in several processes: the same sums, whoever adds them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from stages.contracts.draft import DraftNorm
from stages.contracts.errors import DataError, EngineError
from stages.drafts import _group
from stages.drafts._gradients import add_gradients
from stages.drafts._group import ALONE, Group, share_out
from stages.drafts.eagle3 import PackedBatch, Trainer, look_ahead
from tests.drafts.reference import make_batch, make_draft, make_teacher
from tests.drafts.test_trainer import SCHEDULE
from tests.line import ROOT

MASKS = ["0001111110", "0000", "00111", "0110111101", "0000011"]


def one_row(batch: PackedBatch, row: int) -> PackedBatch:
    at = sum(batch.lengths[:row])
    part = slice(at, at + batch.lengths[row])
    tensors = (t[part] for t in (batch.input_ids, batch.loss_mask, batch.aux, batch.last))
    return PackedBatch(batch.row_ids[row : row + 1], batch.lengths[row : row + 1], *tensors)


def test_rows_are_shared_out_evenly_each_once_and_always_alike() -> None:
    lengths = [5, 90, 3, 30, 7, 2, 80, 31]
    shares = share_out([0, 1, 3, 4, 6, 7], lengths, 3)
    assert sorted(r for share in shares for r in share) == [0, 1, 3, 4, 6, 7]
    assert sorted(sum(lengths[r] for r in share) for share in shares) == [73, 80, 90]
    assert shares == share_out([7, 6, 4, 3, 1, 0], lengths, 3)
    assert share_out([4, 0], lengths, 1) == [[4, 0]], "one process keeps the order"
    assert share_out([4], lengths, 3) == [[4], [], []]


def test_a_step_in_pieces_has_the_gradients_and_the_loss_of_the_whole() -> None:
    draft, teacher, batch = make_draft(), make_teacher(), make_batch(MASKS)
    whole = look_ahead(draft, teacher, batch, 3, 0.8)
    whole.loss.backward()
    wanted = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad()
    pieces = add_gradients(draft, teacher, [one_row(batch, i) for i in range(len(MASKS))], 3, 0.8, ALONE)
    torch.testing.assert_close(pieces.loss, whole.loss.detach(), rtol=0, atol=1e-12)
    assert (pieces.hits, pieces.tried) == (whole.hits, whole.tried) and len(pieces.roots) == len(whole.roots)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-12)


def test_a_process_without_rows_has_nothing_to_add() -> None:
    draft = make_draft()
    ahead = add_gradients(draft, make_teacher(), [], 3, 0.8, ALONE)
    assert float(ahead.loss) == 0.0 and ahead.tried == (0, 0, 0) and ahead.drafted.shape == (0, 3)


def test_another_process_that_has_gone_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")

    monkeypatch.setattr(_group.dist, "all_reduce", gone)
    with pytest.raises(EngineError, match=r"Another process of this training run has ended[\s\S]*Connection closed"):
        Group(1, 2).total([1.0])


def by_rank(rank: int, size: int, sharded: bool, recompute: bool, norms: tuple[DraftNorm, ...]) -> None:
    """What one process does in the test below; run as a module of its own."""
    group = _group.join(torch.device("cpu"))
    assert (group.rank, group.size) == (rank, size)
    batch, empty = make_batch(MASKS, dtype=torch.float32), make_batch(["00000"], dtype=torch.float32)
    draft, teacher = make_draft(dtype=torch.float32, norms=norms), make_teacher(dtype=torch.float32)
    draft.recompute_steps = recompute
    if sharded:
        group.shard(draft, teacher)
    trainer = Trainer(draft, teacher, SCHEDULE, group)
    shares = share_out(range(len(MASKS)), batch.lengths, size)
    losses = [float(trainer.train(*(one_row(batch, i) for i in shares[rank])).loss) for _ in range(5)]
    alone_on_rank_1 = [batch] if rank == size - 1 else [empty]  # the others have nothing to supervise
    losses.append(float(trainer.train(*alone_on_rank_1).loss))
    losses.append(float(trainer.train(*([batch] if rank == 0 else [])).loss))  # the others have no rows at all
    kept = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    losses.append(float(trainer.train(*(one_row(batch, i) for i in shares[rank])).loss))
    trainer.load(7, kept)  # as a resumed run does
    losses.append(float(trainer.train(*(one_row(batch, i) for i in shares[rank])).loss))
    weight = trainer.averaged().fc.weight
    told = [""]
    batch.aux[0] = torch.nan
    try:
        trainer.train(*(one_row(batch, i) for i in shares[rank]))
    except DataError as error:
        told = [error.text()]
    if group.first:
        print(json.dumps({"losses": losses, "told": told[0], "sum": float(weight.double().abs().sum())}))
    _group.leave()


def run_group(size: int, sharded: bool = False, norms: tuple[DraftNorm, ...] = (), recompute: bool = False) -> dict:
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        port = at.getsockname()[1]
    code = "from tests.drafts.test_group import by_rank; import sys; "
    code += "by_rank(*map(int, sys.argv[1:5]), tuple(sys.argv[5:]))"
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, *(str(int(x)) for x in (rank, size, sharded, recompute)), *norms],
            env={**os.environ, **world, "RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    told = [child.communicate(timeout=120) for child in children]
    assert not any(child.returncode for child in children), told
    return json.loads(told[0][0].splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharded", "norms"),
    [(False, ()), (True, ()), (True, ("fc_norm", "norm_output"))],
    ids=["replicated", "sharded", "sharded with norms"],
)
def test_two_processes_step_as_one_also_where_one_of_them_has_nothing_to_supervise(
    sharded: bool, norms: tuple[DraftNorm, ...]
) -> None:
    one, two = run_group(1, norms=norms), run_group(2, sharded, norms)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-6) and min(one["losses"]) > 0
    assert one["losses"][-1] == one["losses"][-2] and two["losses"][-1] == two["losses"][-2], (
        "what was loaded is what was"
    )
    assert two["sum"] == pytest.approx(one["sum"], rel=1e-5)
    assert all(f"row{i}" in two["told"] for i in range(len(MASKS))), "the rows of both are named"


def test_one_process_alone_needs_no_others() -> None:
    assert ALONE.gather("x") == ["x"] and ALONE.total([1.5, 2]) == [1.5, 2] and ALONE.first
