"""Charts: round ticks, marks where they belong, text that stays text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from stages.reporting.charts import Interval, Series, intervals, layers, lines, number, ticks


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.27, 1.81), (0.003, 0.0041), (12, 171), (5, 5), (0, 0)])
def test_ticks_are_round_and_hold_the_data(low: float, high: float) -> None:
    made = ticks(low, high)
    assert made[0] <= low and made[-1] >= high and 2 <= len(made) <= 8
    assert all(len(number(t)) <= 7 for t in made)


def test_steps_stand_at_equal_distances_and_a_mark_between_them_falls_between_them() -> None:
    chart = lines(
        [Series("plain", [(1, 10), (2, 20), (4, 30)], "s0", dots=True)],
        title="t",
        x_label="x",
        y_label="y",
        steps=[1, 2, 4],
        mark=(3, "off above 3"),
    )
    xs = [float(x) for x in re.findall(r'circle cx="([\d.]+)"', chart)]
    (mark,) = [float(x) for x in re.findall(r'class="mark" x1="([\d.]+)"', chart)]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert mark == pytest.approx((xs[1] + xs[2]) / 2, abs=0.2)


def test_charts_are_well_formed_and_escape_names() -> None:
    name = "<a & b>"
    made = [
        lines(
            [Series(name, [(1, 1.0), (2, 2.0)], "s0", bounds=[(0.5, 1.5), (1.5, 2.5)])],
            title=name,
            x_label=name,
            y_label=name,
        ),
        intervals([Interval(name, 1.6, 1.5, 1.7, 1.4)], title=name, x_label="x"),
        layers((3, 16, 28), 30),
    ]
    for chart in made:
        ET.fromstring(chart)


def test_nothing_to_show_is_no_chart() -> None:
    assert lines([Series("empty", [], "s0")], title="t", x_label="x", y_label="y") == ""
    assert intervals([], title="t", x_label="x") == ""
