"""The step clock: the curve, and steps that last as long as it says, with the text untouched."""

from __future__ import annotations

import time

import pytest

from experiments.dials.step_clock import StepClock, StretchCurve
from paceline.contract.errors import InvalidRequestError


class FakeTime:
    """A clock that only sleeping moves, a little less far than asked for the first time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.now_s += duration_s * (0.9 if len(self.slept) == 1 else 1.0)


@pytest.mark.parametrize(
    ("text", "rows", "ms"),
    [
        ("30", 1, 30),
        ("30", 500, 30),
        ("1:30,17:46", 1, 30),
        ("1:30,17:46", 9, 38),
        ("1:30,17:46", 33, 62),  # the last slope goes on
        ("4:30,8:30,16:40.5", 1, 30),  # below the first point its time holds
        ("4:30,8:30,16:40.5", 6, 30),
        ("4:30,8:30,16:40.5", 12, 35.25),
        ("1:30,11:10", 100, 0),  # a falling curve ends at nothing
    ],
)
def test_the_curve(text: str, rows: int, ms: float) -> None:
    assert StretchCurve.parse(text).step_s(rows) == pytest.approx(ms * 1e-3)


@pytest.mark.parametrize(
    "text", ["", "x", "30,40", "0:5,4:6", "8:1,4:2", "4:1,4:2", "-3", "1:nan", "1:30;2:40"]
)
def test_bad_curves_name_the_setting(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StretchCurve.parse(text)
    assert caught.value.field == "step_curve"


def test_a_short_sleep_is_made_up_for() -> None:
    fake = FakeTime()
    clock = StepClock(StretchCurve.parse("1:20,5:24"), fake.clock, fake.sleep)
    clock.stretch(started_s=fake.now_s - 0.004, num_rows=5)
    assert fake.slept == pytest.approx([0.020, 0.002])
    assert fake.now_s == pytest.approx(100.0 - 0.004 + 0.024)


def test_a_step_that_took_longer_than_the_curve_is_left_alone() -> None:
    fake = FakeTime()
    StepClock(StretchCurve.parse("5"), fake.clock, fake.sleep).stretch(fake.now_s - 0.006, 1)
    assert fake.slept == []


def test_the_real_clock_reaches_its_time() -> None:
    begun_s = time.monotonic()
    StepClock(StretchCurve.parse("8")).stretch(begun_s, 1)
    assert time.monotonic() - begun_s >= 0.008
