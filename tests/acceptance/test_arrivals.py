from __future__ import annotations

import numpy as np
import pytest

from stages.acceptance.arrivals import arrival_times


def test_arrivals_are_as_frequent_as_was_asked_for_and_come_in_order() -> None:
    times = arrival_times(4.0, 16, seed=1, repeat=0)
    assert len(times) == 16 and list(times) == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(16 / 4)


def test_a_repeat_has_the_same_arrivals_for_every_arm_and_another_repeat_has_others() -> None:
    assert arrival_times(4.0, 8, 1, 0) == arrival_times(4.0, 8, 1, 0)
    assert arrival_times(4.0, 8, 1, 0) != arrival_times(4.0, 8, 1, 1) != arrival_times(4.0, 8, 2, 1)


def test_gaps_are_those_of_a_poisson_process() -> None:
    """Exponential: as much spread as mean, and 63 % below it."""
    gaps = np.diff(arrival_times(10.0, 20_000, 3, 0))
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
    assert (gaps < 0.1).mean() == pytest.approx(1 - np.exp(-1), abs=0.02)
