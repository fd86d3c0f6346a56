"""Capture points that cannot be used are refused with ones that can."""

from __future__ import annotations

import re

import pytest

from stages.contracts.errors import ParamsError
from stages.contracts.points import check_points, even_points


def advice(points: tuple[int, ...], layers: int) -> str:
    with pytest.raises(ParamsError) as told:
        check_points(points, layers)
    return told.value.do


@pytest.mark.parametrize("points", [(0, 1, 2), (3, 2, 1), (1, 1, 2), (1, 2, 64)])
def test_the_points_proposed_can_be_used_in_every_target_of_four_layers_or_more(
    points: tuple[int, ...],
) -> None:
    for layers in range(4, 65):
        named = re.search(r"\[(\d+), (\d+), (\d+)\]", advice(points, layers))
        assert named is not None, layers
        proposed = tuple(map(int, named.groups()))
        assert check_points(proposed, layers) == proposed and len(set(proposed)) == 3


def test_six_layers_are_not_too_shallow_and_get_evenly_spaced_points() -> None:
    assert even_points(6) == (1, 3, 5)
    assert advice((0, 3, 5), 6).startswith("for this target take [1, 3, 5], spaced evenly")


def test_a_deep_target_gets_the_usual_points() -> None:
    assert advice((0, 16, 29), 32) == "for this target [2, 16, 29] is usual"


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_fewer_than_four_layers_are_too_shallow(layers: int) -> None:
    assert advice((1, 2, 3), layers) == (
        f"a target of {layers} layers is too shallow for three distinct points: 4 are the least"
    )
