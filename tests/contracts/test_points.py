"""Capture points that cannot be used are refused with ones that can."""

from __future__ import annotations

import re

import pytest

from stages.contracts.errors import ParamsError
from stages.contracts.points import CapturePoints, check_points, even_points


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


def fault(points: tuple[int, ...], layers: int, **asked: bool) -> str:
    with pytest.raises(ParamsError, match="These capture points cannot be used") as told:
        CapturePoints(points, layers, **asked)
    return told.value.got


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ((3, 1, 2), "not ascending; engines concatenate captures in ascending order"),
        ((1, 1, 2), "doubled; engines drop doubles in silence"),
        ((0, 3, 5), "0 is the embedding output, before any layer"),
        ((-1, 3, 5), "negative; count layers from the embedding"),
        ((2, 4, 8), "8 is the last point of this target and no engine can capture it"),
        ((2, 4, 9), "beyond 8, the last point of this target"),
    ],
)
def test_what_is_wrong_with_the_points_of_a_target_of_eight_layers_is_said(points: tuple[int, ...], words: str) -> None:
    assert words in fault(points, 8)


def test_embedding_and_last_point_are_held_only_when_asked_for() -> None:
    assert CapturePoints((0, 4, 8), 8, embedding=True, last=True).points == (0, 4, 8)
    assert "0 is the embedding" in fault((0, 4, 8), 8, last=True)
    assert "8 is the last point" in fault((0, 4, 8), 8, embedding=True)
    assert "beyond 8" in fault((0, 4, 9), 8, embedding=True, last=True)


@pytest.mark.parametrize(("layers", "points"), [(61, (2, 30, 58)), (8, (2, 4, 5)), (5, (1, 2, 4)), (4, (1, 2, 3))])
def test_usual_points_by_depth(layers: int, points: tuple[int, int, int]) -> None:
    usual = CapturePoints.usual(layers)
    assert usual.points == points and usual.slots == (*points, layers)
    assert usual.width(576) == 3 * 576 and tuple(usual) == points and len(usual) == 3


@pytest.mark.parametrize("points", [(1,), (1, 2)])
def test_three_layers_are_refused_with_a_hint_even_where_the_points_are_in_order(points: tuple[int, ...]) -> None:
    assert "3 layers leave no room for a low, a middle and a high point" in fault(points, 3)
    assert "too shallow for three distinct points: 4 are the least" in advice((1, 2, 3), 3)
    with pytest.raises(ParamsError, match="cannot be used"):
        CapturePoints.usual(3)
