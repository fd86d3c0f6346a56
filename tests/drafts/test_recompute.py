"""Steps made again on the way back: the same loss and gradients, and memory that hardly grows with the number of steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.contracts.draft import NORMS, DraftNorm
from stages.drafts._gradients import add_gradients
from stages.drafts._group import ALONE
from stages.drafts.eagle3 import Eagle3, Eagle3Config, PackedBatch, Teacher, look_ahead
from tests.drafts.reference import make_batch, make_draft, make_teacher
from tests.drafts.test_group import MASKS, one_row, run_group

# The default target's proportions, a sixth as wide.
SHAPED = Eagle3Config(96, 256, 3, 1, 32, 64, 40, 1e-5, 10000.0, 4096)


def gradients(draft: Eagle3, teacher: Teacher, *batches: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    draft.zero_grad()
    loss = add_gradients(draft, teacher, batches, 5, 0.8, ALONE).loss.detach()
    return loss, {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("norms", [(), NORMS], ids=["plain", "norms"])
@pytest.mark.parametrize("products", [None, torch.bfloat16], ids=["as weights", "bfloat16"])
@pytest.mark.parametrize("kind", ["kl", "lk"])
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "accumulated"])
def test_loss_and_gradients_are_those_without_to_the_bit(
    norms: tuple[DraftNorm, ...], products: torch.dtype | None, kind: str, pieces: bool
) -> None:
    dtype = torch.float32 if products else torch.float64
    draft, teacher = make_draft(dtype=dtype, norms=norms), make_teacher(dtype=dtype)
    batch = make_batch(MASKS, dtype=dtype)
    teacher.loss, teacher.products = kind, products  # type: ignore[assignment]
    batches = [one_row(batch, i) for i in range(len(MASKS))] if pieces else [batch]
    loss, wanted = gradients(draft, teacher, *batches)
    draft.recompute_steps = True
    again, got = gradients(draft, teacher, *batches)
    assert torch.equal(again, loss) and got.keys() == wanted.keys() == dict(draft.named_parameters()).keys()
    assert [name for name in got if not torch.equal(got[name], wanted[name])] == []


def kept_bytes(steps: int, recompute: bool, products: torch.dtype | None) -> int:
    """Bytes that the way back holds of one long row: every storage that autograd was told to save, once; without weights."""
    draft, teacher = make_draft(dtype=torch.float32, config=SHAPED), make_teacher(dtype=torch.float32, config=SHAPED)
    teacher.products, draft.recompute_steps = products, recompute
    tokens = 600
    batch = PackedBatch(
        row_ids=("long",),
        lengths=(tokens,),
        input_ids=torch.arange(tokens) % SHAPED.vocab_size,
        loss_mask=torch.arange(tokens) >= 100,
        aux=torch.randn(tokens, 3 * SHAPED.hidden_size),
        last=torch.randn(tokens, SHAPED.hidden_size),
    )
    given = {t.untyped_storage().data_ptr() for t in (*draft.parameters(), draft.embedding, batch.aux, batch.last)}
    held: dict[int, Tensor] = {}  # kept, so that no address is given out twice

    def keep(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ahead = look_ahead(draft, teacher, batch, steps, 0.8)
    assert ahead.tried[-1] == tokens - 100 - 1 - (steps - 1) and ahead.loss.requires_grad
    return sum(t.untyped_storage().nbytes() for at, t in held.items() if at not in given)


@pytest.mark.parametrize("products", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_kept_hardly_grows_with_the_number_of_steps(products: torch.dtype | None) -> None:
    plain, again = ({s: kept_bytes(s, recompute, products) for s in (3, 7)} for recompute in (False, True))
    assert again[7] - again[3] < 0.15 * (plain[7] - plain[3]), (plain, again)
    assert again[7] < 0.6 * plain[3], "seven steps with it hold less than three without"
    H, kv = SHAPED.hidden_size, SHAPED.kv_heads * SHAPED.head_dim
    a_query = (again[7] - again[3]) / (4 * 500) / 4  # float32 numbers that a query of a further step leaves behind
    assert a_query == pytest.approx(2 * H + 2 * kv, rel=0.05), "its h, key, value, and the gradient that the head gave"


def test_evaluation_keeps_nothing_and_is_the_same() -> None:
    draft, teacher, batch = make_draft(), make_teacher(), make_batch(MASKS)
    with torch.no_grad():
        plain = look_ahead(draft, teacher, batch, 4, 0.8)
        draft.recompute_steps = True
        again = look_ahead(draft, teacher, batch, 4, 0.8)
    assert torch.equal(plain.loss, again.loss) and torch.equal(plain.drafted, again.drafted)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_two_processes_that_recompute_step_as_one_that_does_not(sharded: bool) -> None:
    one, two = run_group(1), run_group(2, sharded, recompute=True)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-6) and min(one["losses"]) > 0
    assert two["sum"] == pytest.approx(one["sum"], rel=1e-5)
