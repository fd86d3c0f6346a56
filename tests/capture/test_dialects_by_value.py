"""The table of dialects, proved by value: what a tool takes out of a running model is compared with this project's points.

transformers runs a tiny Llama and a tiny DeepSeek-V3 (latent attention, mixture of experts). Its hidden_states are one
dialect; the input and the output of each of its layers are what all others say they take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.capture.dialects import DIALECTS, layer_ids, points_of
from stages.contracts.errors import EngineError
from stages.targets import load_target
from stages.targets._decoder import Decoder
from tests import latent, tiny

N = tiny.LAYERS
IDS = [1, 30, 40, 50, 60, 70, 80, 90, 100, 9, 8, 7]
OUTPUT_OF_LAYER = ("specforge", "torchspec", "nemo_automodel", "model_optimizer", "speculators_legacy")
INPUT_OF_LAYER = ("eagle", "vllm", "speculators")


class Ran(NamedTuple):
    """What transformers shows of one row [T, H]: its hidden_states, what goes into each layer (and into the norm) and what
    comes out of each; and the same row's points in this project's own decoder."""

    model_type: str
    hidden_states: list[Tensor]
    into: list[Tensor]
    out_of: list[Tensor]
    points: list[Tensor]
    target: Decoder


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    (tiny.make_target if request.param == "llama" else latent.make_target)(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    into: list[Tensor] = []
    out_of: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: into.append(args[0][0]))
        layer.register_forward_hook(lambda _, __, out: out_of.append((out[0] if isinstance(out, tuple) else out)[0]))
    model.model.norm.register_forward_pre_hook(lambda _, args: into.append(args[0][0]))
    with torch.no_grad():
        hidden_states = [h[0] for h in model(torch.tensor([IDS]), output_hidden_states=True).hidden_states]
    target = load_target(folder)
    states = target.packed(torch.tensor(IDS), [len(IDS)], range(N + 1)).states
    return Ran(request.param, hidden_states, into, out_of, [states[p] for p in range(N + 1)], target)


def nearest(state: Tensor, points: list[Tensor]) -> int:
    """The point a state holds; it must hold it exactly, and no other one nearly."""
    apart = [float(((state - p).norm(dim=-1) / p.norm(dim=-1)).median()) for p in points]
    best, next_best = sorted(apart)[:2]
    assert best < 1e-5 and next_best > 0.05, apart
    return apart.index(best)


def test_hidden_states_of_transformers_are_the_points_of_their_own_number_the_first_being_the_embedding(
    ran: Ran,
) -> None:
    for i in range(N):
        assert (
            points_of((i,), "transformers", ran.model_type, N) == (nearest(ran.hidden_states[i], ran.points),) == (i,)
        )
    assert layer_ids((1, 3, 5), "transformers", ran.model_type, N) == (1, 3, 5)


@pytest.mark.parametrize("last", [N, -1])
def test_the_last_of_hidden_states_is_the_last_point_after_the_norm_and_refused(ran: Ran, last: int) -> None:
    state = ran.hidden_states[last]
    normed = F.rms_norm(ran.points[N], (tiny.HIDDEN,), ran.target.norm, ran.target.config.eps)
    torch.testing.assert_close(state, normed, rtol=2e-4, atol=2e-5)
    assert all(float((state - p).norm() / p.norm()) > 0.05 for p in ran.points), "then it would be a point after all"
    with pytest.raises(EngineError, match="transformers cannot capture") as error:
        points_of((1, last), "transformers", ran.model_type, N)
    assert "comes after the final norm and is no point" in error.value.expected


@pytest.mark.parametrize("dialect", OUTPUT_OF_LAYER)
def test_tools_that_take_the_output_of_a_layer_get_the_point_after_it(ran: Ran, dialect: str) -> None:
    for i in range(N if DIALECTS[dialect].takes_last else N - 1):
        assert points_of((i,), dialect, ran.model_type, N) == (nearest(ran.out_of[i], ran.points),)
    assert points_of((-1,), dialect, ran.model_type, N) == (nearest(ran.into[0], ran.points),) == (0,)


@pytest.mark.parametrize("dialect", INPUT_OF_LAYER)
def test_tools_that_take_the_input_of_a_layer_get_the_point_before_it(ran: Ran, dialect: str) -> None:
    for i in range(N + 1 if DIALECTS[dialect].takes_last else N):
        assert points_of((i,), dialect, ran.model_type, N) == (nearest(ran.into[i], ran.points),)
