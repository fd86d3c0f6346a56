"""The table of dialects, proved by value against the SGLang that runs here: its own Llama and DeepSeek-V3 model classes.

Latent attention over its paged cache (expanded in the prefill, absorbed in decoding), grouped experts and yarn positions are
SGLang's code; attention itself comes from the stand-ins. A process a target, no server.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stages.capture.dialects import layer_ids, points_of
from stages.contracts.errors import EngineError
from stages.engines._sglang_launch import environment
from stages.engines.sglang import VERSION
from stages.targets import load_target
from tests import latent, tiny
from tests.sglang.conftest import PYTHON

pytestmark = pytest.mark.sglang
N = tiny.LAYERS
PROMPT, THEN = [1, 30, 40, 50, 60, 70, 80, 90, 100], [9, 8, 7]
LISTS: dict[str, list[int] | None] = {
    "its own": None,
    "first id 1": [1, 2, 4],
    "first id 1, up to the last layer": [1, 2, 5],
    "first id 2": [2, 3, 5],
    "first id 2, low": [2, 3, 4],
    "first id 0": [0, 2, 4],
    "first id 4, out of order": [4, 1, 3],
    "first id -1": [-1, 2, 4],
    "last point": [2, 3, 6],
    "last point as the only one": [5],
    "twice the same": [2, 3, 3],
}


class Ran(NamedTuple):
    """states: of each list [tokens, captures · H]; refused: SGLang's words where it captured nothing; points: of the same row,
    [tokens, H] each, in this project's own decoder."""

    family: str
    model_class: str
    states: dict[str, Tensor]
    refused: dict[str, str]
    points: list[Tensor]


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    assert PYTHON.exists(), "no SGLang environment: run `make sglang`"
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        folder = tiny.make_target(root / "target")
    else:  # on a CPU SGLang has DeepSeek's yarn positions and no others
        folder = latent.make_target(root / "target", rope_scaling=latent.YARN)
    asked, out = root / "asked.json", root / "states.safetensors"
    asked.write_text(json.dumps({"prompt": PROMPT, "then": THEN, "lists": LISTS}))
    command = [str(PYTHON), "-P", str(Path(__file__).with_name("driver.py")), str(folder), str(asked), str(out)]
    env = environment("cpu", 1)
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=root, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    ids = torch.tensor(PROMPT + THEN)
    states = load_target(folder).packed(ids, [len(ids)], range(N + 1)).states
    return Ran(request.param, said["class"], load_file(out), said["refused"], [states[p] for p in range(N + 1)])


def held(ran: Ran, name: str) -> tuple[int, ...]:
    """The points that a list's captures hold, slot by slot: each exactly one, and no other nearly, at every token."""
    found = []
    for state in ran.states[name].split(tiny.HIDDEN, -1):
        assert state.shape == ran.points[0].shape
        apart = torch.stack([(state - p).norm(dim=-1) / p.norm(dim=-1) for p in ran.points])  # [points, tokens]
        best = apart.median(dim=1).values.argmin()
        others = torch.cat([apart[:best], apart[best + 1 :]])
        assert float(apart[best].max()) < 2e-4 and float(others.median(dim=1).values.min()) > 0.05, apart
        found.append(int(best))
    return tuple(found)


def meant(ran: Ran, name: str) -> tuple[int, ...]:
    return points_of(LISTS[name], "sglang", ran.family, N, version=VERSION)


CAPTURED = [
    n
    for n in LISTS
    if n not in ("its own", "first id -1", "last point", "last point as the only one", "twice the same")
]


@pytest.mark.parametrize("name", CAPTURED)
def test_layer_ids_mean_the_points_that_the_table_says(ran: Ran, name: str) -> None:
    if max(LISTS[name] or ()) == N - 1 and (
        ran.family == "llama" or name.startswith("first id 1")
    ):  # id+1 is the last point
        assert ran.refused.get(name) == "captured 2 of 3 aux hidden states" or len(held(ran, name)) == 2, (
            "dropped in silence"
        )
        with pytest.raises(EngineError, match="cannot capture these points"):
            meant(ran, name)
        return
    assert held(ran, name) == meant(ran, name)
    if ran.family == "deepseek_v3" and meant(ran, name)[0] == 1:  # ascending ids would begin with 1, and mean others
        with pytest.raises(EngineError, match="the first must not be 1"):
            layer_ids(meant(ran, name), "sglang", ran.family, N, version=VERSION)
        return
    written = layer_ids(meant(ran, name), "sglang", ran.family, N, version=VERSION)
    assert points_of(written, "sglang", ran.family, N, version=VERSION) == meant(ran, name)


def test_the_classes_are_the_engines_own_and_differ_where_the_table_says_so(ran: Ran) -> None:
    assert ran.model_class == {"llama": "LlamaForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}[ran.family]
    expected = {"llama": (3, 4, 5), "deepseek_v3": (2, 3, 4)}[ran.family]
    assert held(ran, "first id 2, low") == expected and held(ran, "first id 1") == (2, 3, 5)


def test_minus_one_is_the_embedding_for_llama_and_breaks_deepseek(ran: Ran) -> None:
    if ran.family == "llama":
        assert held(ran, "first id -1") == meant(ran, "first id -1") == (0, 3, 5)
        return
    assert ran.refused["first id -1"] == "captured 2 of 3 aux hidden states"
    with pytest.raises(EngineError, match=r"expected: points from 0 \(embedding\) to 5"):
        meant(ran, "first id -1")


def test_the_last_point_is_out_of_reach_and_the_table_refuses_it(ran: Ran) -> None:
    """Llama drops it without a word, and breaks when nothing is left; DeepSeek breaks off, and has one layer more in reach."""
    if ran.family == "llama":
        assert held(ran, "last point") == (3, 4), "2, 3, 6 mean 3, 4, 7"
        assert "values to unpack" in ran.refused["last point as the only one"]
    else:
        assert ran.refused["last point"] == "captured 2 of 3 aux hidden states"
        assert held(ran, "last point as the only one") == (5,)
    with pytest.raises(EngineError, match="6 before the final norm is out of its reach"):
        meant(ran, "last point")


def test_doubles_are_dropped_by_llama_and_break_deepseek(ran: Ran) -> None:
    for name in ("its own", "twice the same"):  # SGLang's own for six layers: 2, 3, 3
        if ran.family == "llama":
            assert held(ran, name) == meant(ran, name)
        else:
            assert ran.refused[name] == "captured 2 of 3 aux hidden states"
