"""Step curves: robust, monotone, adaptive, storable."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.scheduling import StepCurve
from paceline.scheduling.curve_fit import isotonic
from paceline.scheduling.curves import bucket_of

samples = st.lists(
    st.tuples(st.integers(1, 3000), st.floats(1e-5, 10, allow_nan=False)), min_size=1, max_size=40
)


@given(samples)
def test_a_curve_never_falls(points: list[tuple[int, float]]) -> None:
    curve = StepCurve.fit(points)
    values = [curve(rows) for rows in range(1, 4000, 37)]
    assert all(math.isfinite(value) and value > 0 for value in values)
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(values))


def test_values_in_between_are_interpolated_and_beyond_extrapolated() -> None:
    curve = StepCurve.fit([(1, 0.010), (3, 0.014), (8, 0.014)])
    assert curve(1) == 0.010
    assert curve(2) == pytest.approx(0.012)
    assert curve(5) == pytest.approx(0.014)
    assert curve(15) == pytest.approx(0.014 + 7 * 0.004 / 7)  # flat at the end: the mean slope goes on
    assert StepCurve.fit([(4, 0.01)])(8) == pytest.approx(0.02)
    assert StepCurve.fit([(4, 0.01)])(1) == 0.01


def test_single_slow_steps_move_nothing() -> None:
    curve = StepCurve.fit([(4, 0.010)] * 9 + [(4, 3.0)] * 4)
    assert curve(4) == 0.010


def test_violations_of_order_are_pooled() -> None:
    assert isotonic([1.0, 3.0, 2.0, 4.0], [1, 1, 1, 1]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([3.0, 1.0], [3, 1]) == [2.5, 2.5]
    assert isotonic([], []) == []


def test_a_lasting_change_is_followed() -> None:
    curve = StepCurve(max_samples=32, half_life=8)
    for _ in range(40):
        curve.observe(2, 0.010)
    for _ in range(12):
        curve.observe(2, 0.030)
    assert curve(2) == 0.030


def test_buckets_are_exact_where_it_matters() -> None:
    assert [bucket_of(rows) for rows in range(1, 33)] == list(range(1, 33))
    assert len({bucket_of(rows) for rows in range(33, 4097)}) == 29
    assert all(abs(bucket_of(rows) / rows - 1) < 0.12 for rows in range(33, 4097))


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_nonsense_is_refused(rows: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="not a step"):
        StepCurve().observe(rows, seconds)


def test_an_empty_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StepCurve()(1)
