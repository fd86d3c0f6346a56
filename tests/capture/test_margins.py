"""What precision explains, by the dtype stored and the dtype computed: measured, and told apart from the next pair."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.capture.margins import REFUSED, coarser, margin_of
from stages.capture.probe import distances, high
from stages.targets import load_target
from tests import tiny
from tests.capture.conftest import make_row
from tests.capture.stores import states_of

NAMES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[float, float]]:
    """{(stored, computed): (median, 99 of 100)} over points of a tiny target, against float32 in float32."""
    folder = tiny.make_target(tmp_path_factory.mktemp("target"))
    exact = load_target(folder)
    ids = [torch.from_numpy(make_row(i, 160).input_ids).long() for i in range(4)]
    points = (*tiny.POINTS, tiny.LAYERS)
    found = {}
    for computed in NAMES:
        target = load_target(folder, "cpu", computed)
        for stored in NAMES:
            per_row = []
            for row in ids:
                stream = target.packed(row, [len(row)], points)
                states = torch.stack([stream.states[p] for p in points], 1).to(getattr(torch, stored))
                far = distances(exact, row, states)
                per_row.append(torch.stack([far[:, s, p] for s, p in enumerate(points)], -1))
            far = torch.cat(per_row)
            found[stored, computed] = (float(far.median(0).values.max()), max(high(far[:, s]) for s in range(4)))
    return found


@pytest.mark.parametrize("computed", NAMES)
@pytest.mark.parametrize("stored", NAMES)
def test_states_keep_to_the_margin_of_their_pair(
    measured: dict[tuple[str, str], tuple[float, float]], stored: str, computed: str
) -> None:
    median, p99 = measured[stored, computed]
    margin = margin_of(stored, computed)
    assert median <= margin.median < REFUSED and p99 <= margin.p99


@pytest.mark.parametrize(
    ("rough", "fine"),
    [
        (("float16", "float32"), ("float32", "float32")),
        (("bfloat16", "float32"), ("float16", "float32")),
        (("float32", "float16"), ("float32", "float32")),
        (("bfloat16", "bfloat16"), ("bfloat16", "float32")),
    ],
)
def test_a_rougher_pair_does_not_pass_for_a_finer_one(
    measured: dict[tuple[str, str], tuple[float, float]], rough: tuple[str, str], fine: tuple[str, str]
) -> None:
    assert measured[rough][0] > margin_of(*fine).median


def test_figures_are_those_that_were_measured_on_a_real_target() -> None:
    assert margin_of("float32", "float32").median == 1e-5
    assert margin_of("bfloat16", "float32").median == 3e-3
    assert (margin_of("bfloat16", "bfloat16").median, margin_of("float32", "bfloat16").p99) == (0.03, 0.08)
    assert margin_of("bfloat16") == margin_of("bfloat16", "bfloat16"), "engines store what they compute"
    assert margin_of("float8_e4m3fn", "float32").median > margin_of("bfloat16", "bfloat16").median
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float16") == "bfloat16"


def test_nothing_in_the_line_replaces_values_that_are_no_numbers() -> None:
    stages = Path(__file__).parents[2] / "stages"
    assert [p for p in stages.rglob("*.py") if "nan_to_num" in p.read_text()] == []


def test_states_helper_stores_what_the_target_computes(tmp_path: Path) -> None:
    target = load_target(tiny.make_target(tmp_path / "target"))
    ids = torch.arange(3, 40)
    assert float(distances(target, ids, states_of(target, ids))[:, 3, tiny.LAYERS].median()) < 3e-3
