"""What speculation really brought: sums over passes against their definition."""

from __future__ import annotations

import dataclasses
import random

import pytest

from paceline.scheduling.speed import MIN_PASSES, MeasuredSpeed, SpeedMeter, TimedPass

PLAIN = TimedPass(0, 1, 1, 1, 0, True, 10e-3, 0.0, 1e-3)
DRAFTED = TimedPass(3, 5, 1, 2, 0, True, 12e-3, 7e-3, 2e-3)


def plain_step(num_sequences: int) -> float:
    return 10e-3 + 1e-3 * (num_sequences - 1)


def test_speed_is_plain_time_for_the_same_tokens_over_real_time() -> None:
    meter = SpeedMeter()
    for _ in range(200):
        meter.add(PLAIN, plain_step)
    for _ in range(MIN_PASSES + 4):
        meter.add(DRAFTED, plain_step)
    found = meter.measured(3)
    assert found is not None
    assert found.speedup == pytest.approx(2 * 11 / 21)
    assert found.error == pytest.approx(0, abs=1e-6)
    assert meter.measured(2) is None
    assert meter.measured(4) is None


def test_load_counts_each_sequence() -> None:
    meter = SpeedMeter()
    one = TimedPass(1, 12, 4, 6, 1, True, 16e-3, 0.0, 0.0)
    for _ in range(40):
        meter.add(one, plain_step)
    found = meter.measured(1)
    assert found is not None
    assert found.speedup == pytest.approx(13e-3 * 6 / 4 / 16e-3)
    assert found.hit_rate == pytest.approx(1 / 4)


def test_a_new_policy_starts_anew_and_old_passes_do_not_count() -> None:
    meter = SpeedMeter()
    for _ in range(100):
        meter.add(DRAFTED, plain_step)
    slow = dataclasses.replace(DRAFTED, policy_version=4, num_tokens=1)
    for _ in range(MIN_PASSES - 2):
        meter.add(slow, plain_step)
        meter.add(DRAFTED, plain_step)
        assert meter.measured(4) is None
    for _ in range(4):
        meter.add(slow, plain_step)
    found = meter.measured(4)
    assert found is not None
    assert found.speedup < 0.6


def test_sequences_that_may_not_be_drafted_for_say_nothing() -> None:
    meter = SpeedMeter()
    for _ in range(100):
        meter.add(dataclasses.replace(DRAFTED, may_draft=False), plain_step)
    assert meter.measured(3) is None


def test_the_error_covers_the_truth() -> None:
    """A new meter each time; with the true ratio known, nineteen of twenty must not lie below it."""
    generator = random.Random(7)
    inside, truth = 0, 2.0 * 10 / 21
    for _ in range(300):
        meter = SpeedMeter()
        for _ in range(100):
            tokens = generator.choice((1, 1, 2, 2, 2, 4))
            wait_s = generator.choice((3e-3, 11e-3))
            one = TimedPass(1, 5, 1, tokens, 0, True, 12e-3, wait_s, 2e-3)
            meter.add(one, lambda _: 8e-3)
        found = meter.measured(1)
        assert found is not None
        assert 0 < found.error < 0.1
        inside += found.speedup + 1.64 * found.error >= truth
    assert 265 <= inside <= 299


def test_few_passes_move_a_belief_a_little_and_many_overrule_it() -> None:
    def believed(error: float, expected: float) -> float:
        return MeasuredSpeed(0.98, error, 0.0, 100).believed(expected)

    assert believed(0.1, 1.2) == pytest.approx(1.09)  # as sure as the model
    assert believed(1.0, 1.2) == pytest.approx(1.2, abs=0.01)
    assert believed(0.01, 1.2) < 0.983, "a loss of two percent is found out"
    assert believed(0.0, 3.0) == 0.98


@pytest.mark.parametrize(
    "change", [{"num_sequences": 0}, {"num_rows": 0}, {"num_tokens": -1}, {"wait_s": -1.0}]
)
def test_passes_that_cannot_be_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"cannot be|negative"):
        dataclasses.replace(DRAFTED, **change)  # type: ignore[arg-type]


def test_waits_are_those_of_passes_that_waited() -> None:
    meter = SpeedMeter()
    looked = dataclasses.replace(DRAFTED, wait_s=5e-6)
    for _ in range(MIN_PASSES - 1):
        meter.add(DRAFTED, plain_step)
        meter.add(looked, plain_step)
    found = meter.measured(3)
    assert found is not None
    assert found.wait_s is None  # too few
    for _ in range(4):
        meter.add(DRAFTED, plain_step)
    found = meter.measured(3)
    assert found is not None
    assert found.wait_s == pytest.approx(7e-3)
