"""Acceptance, durations and draft times."""

from __future__ import annotations

import json
import math
import random

import pytest

from paceline.scheduling import AcceptanceEstimator, DraftTimeModel, DurationSketch


def test_acceptance_rates_converge_per_position() -> None:
    rng = random.Random(1)
    truth = [0.9, 0.6, 0.3]
    estimator = AcceptanceEstimator(half_life=2000)
    for _ in range(6000):
        accepted = 0
        while accepted < 3 and rng.random() < truth[accepted]:
            accepted += 1
        estimator.observe(3, accepted)
    assert estimator.rates(3) == pytest.approx(truth, abs=0.04)
    assert estimator.path_acceptances(3) == pytest.approx([0.9, 0.54, 0.162], abs=0.04)
    assert 1 + sum(estimator.path_acceptances(3)) == pytest.approx(1 + 0.9 + 0.54 + 0.162, abs=0.08)


def test_what_lies_behind_a_rejection_is_no_trial() -> None:
    estimator = AcceptanceEstimator(half_life=1e9)
    estimator.observe(4, 1)
    assert estimator.to_dict()["attempts"][:4] == pytest.approx([1, 1, 0, 0])


def test_unseen_positions_take_the_rate_before_them() -> None:
    estimator = AcceptanceEstimator(max_positions=4, prior_rate=0.6, half_life=1e9)
    assert estimator.rates(6) == (0.6,) * 6
    for _ in range(1000):
        estimator.observe(1, 1)
    rates = estimator.rates(6)
    assert rates[0] > 0.99
    assert rates[1:] == (rates[0],) * 5


def test_old_rounds_are_forgotten() -> None:
    estimator = AcceptanceEstimator(half_life=20)
    for _ in range(500):
        estimator.observe(1, 1)
    for _ in range(100):
        estimator.observe(1, 0)
    assert estimator.rates(1)[0] < 0.15


def test_acceptance_survives_json() -> None:
    estimator = AcceptanceEstimator()
    for accepted in (0, 3, 2, 4):
        estimator.observe(4, accepted)
    again = AcceptanceEstimator.from_dict(json.loads(json.dumps(estimator.to_dict())))
    assert again.rates(5) == estimator.rates(5)


@pytest.mark.parametrize(
    "value",
    [
        {"schema_version": 9, "attempts": [1], "accepts": [1]},
        {"schema_version": 1, "attempts": [1], "accepts": [2]},
        {"schema_version": 1, "attempts": [1, 2], "accepts": [1]},
        {"schema_version": 1, "attempts": [], "accepts": []},
        {"schema_version": 1, "attempts": [math.nan], "accepts": [0]},
    ],
)
def test_implausible_acceptance_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="acceptance"):
        AcceptanceEstimator.from_dict(value)


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (2, -1), (-1, -1)])
def test_impossible_rounds_are_refused(drafted: int, accepted: int) -> None:
    with pytest.raises(ValueError, match="accepted of"):
        AcceptanceEstimator().observe(drafted, accepted)


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf])
def test_impossible_durations_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        DurationSketch.of([seconds])
    with pytest.raises(ValueError, match="not a draft"):
        DraftTimeModel().observe(1, seconds)


def test_draft_time_is_a_line() -> None:
    model = DraftTimeModel()
    for length in (1, 3, 5, 8, 2):
        model.observe(length, 0.002 + 0.0015 * length)
    assert model.coefficients == pytest.approx((0.002, 0.0015, 0, 0), abs=1e-6)
    assert model(6) == pytest.approx(0.011, rel=1e-3)
    assert model(0) == 0


def test_one_length_only_keeps_the_guess_of_the_slope() -> None:
    model = DraftTimeModel(per_token_s=0.001)
    assert model(4) == pytest.approx(0.004)
    for _ in range(5):
        model.observe(4, 0.010)
    assert model(4) == pytest.approx(0.010)
    assert model(5) == pytest.approx(0.011)


def test_draft_time_coefficients_are_never_negative() -> None:
    falling = DraftTimeModel()
    for length, seconds in ((1, 0.009), (8, 0.002)):
        falling.observe(length, seconds)
    steep = DraftTimeModel()
    for length, seconds in ((4, 0.001), (5, 0.009)):
        steep.observe(length, seconds)
    assert min(*falling.coefficients, *steep.coefficients) >= 0


def test_draft_time_grows_with_sequences_and_stands_outliers() -> None:
    rng = random.Random(3)
    truth = (0.002, 0.001, 0.0003, 0.0002)

    def took(tokens: int, sequences: int) -> float:
        base, token, sequence, both = truth
        return base + token * tokens + (sequence + both * tokens) * (sequences - 1)

    model = DraftTimeModel(half_life=500)
    for _ in range(300):
        tokens, sequences = rng.randrange(1, 9), rng.choice((1, 2, 4, 8))
        outlier = 30 if rng.random() < 0.1 else 1
        model.observe(tokens, took(tokens, sequences) * outlier * rng.uniform(0.98, 1.02), sequences)
    for tokens, sequences in ((1, 1), (4, 2), (8, 8), (6, 16)):
        assert model(tokens, sequences) == pytest.approx(took(tokens, sequences), rel=0.06)
    assert model(4, 9) >= model(4, 8) >= model(3, 8)


def test_a_sketch_is_bounded_merges_and_is_right_to_one_bucket() -> None:
    rng = random.Random(4)
    waits = [rng.lognormvariate(-7, 1) for _ in range(1000)]
    sketch = DurationSketch.of(waits)
    ranked = sorted(waits)
    for fraction in (0.05, 0.5, 0.95, 0.99):
        assert sketch.quantile(fraction) == pytest.approx(ranked[int(fraction * 1000) - 1], rel=0.05)
    assert sketch.mean_s == pytest.approx(sum(waits) / 1000)
    again = DurationSketch.from_dict(json.loads(json.dumps(sketch.to_dict())))
    assert again == sketch
    assert len(DurationSketch.of([10.0**e for e in range(-12, 12)] * 50).buckets) <= 235
    parts = [DurationSketch.of(waits[start : start + 100]) for start in range(0, 1000, 100)]
    left, right = parts[0], parts[-1]
    for part in parts[1:]:
        left = left.merged(part)
    for part in parts[-2::-1]:
        right = part.merged(right)
    assert left.count == right.count == 1000
    assert left.p50_s == pytest.approx(right.p50_s, rel=1e-3)  # what is forgotten differs a little


def test_a_sketch_forgets() -> None:
    sketch = DurationSketch.of([1.0] * 1000)
    for _ in range(40):
        sketch = sketch.merged(DurationSketch.of([0.001] * 500))
    assert sketch.quantile(0.9999) == pytest.approx(0.001, rel=0.1)
    assert sketch.mean_s == pytest.approx(0.001, rel=0.01)
    assert sketch.weight < 3000


@pytest.mark.parametrize(
    "value",
    [
        {"count": -1, "sum_s": 0, "buckets": {}},
        {"count": 1, "sum_s": math.nan, "buckets": {}},
        {"count": 1, "sum_s": 0, "buckets": {"999": 1.0}},
        {"count": 1, "sum_s": 0, "buckets": {"1": math.inf}},
        {"count": 1, "sum_s": 0, "buckets": {"x": 1.0}},
    ],
)
def test_impossible_sketches_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        DurationSketch.from_dict(value)
