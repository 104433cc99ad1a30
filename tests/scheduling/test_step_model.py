"""Step times over rows, sequences and context: planted models, outliers, and machines that change."""

from __future__ import annotations

import random

import pytest

from paceline.scheduling import StepCurve
from paceline.scheduling.robust import find_shift, nonnegative_fit, weighted_median

PER_CONTEXT_S, PER_SEQUENCE_S = 2e-6, 3e-4
Sample = tuple[int, float, int, int]


def planted(rng: random.Random, rows: int, sequences: int, context: int, factor: float = 1.0) -> Sample:
    seconds = 0.010 + 2e-4 * rows + PER_CONTEXT_S * context + PER_SEQUENCE_S * sequences
    return rows, factor * seconds * rng.uniform(0.98, 1.02), sequences, context


def load(rng: random.Random, num_steps: int, factor: float = 1.0) -> list[Sample]:
    """Steps of 1 to 4 sequences with drafts of 0 to 5 tokens and contexts that differ."""
    steps = []
    for _ in range(num_steps):
        sequences = rng.choice((1, 2, 4))
        rows = rng.choice((4, 8, 12, 16))
        steps.append(planted(rng, rows, sequences, sequences * rng.randrange(50, 4000), factor))
    return steps


def test_the_planted_model_is_found_also_among_outliers() -> None:
    rng = random.Random(1)
    clean = load(rng, 400)
    spoiled = [(r, t * (10 if rng.random() < 0.1 else 1), n, c) for r, t, n, c in clean]
    for samples in (clean, spoiled):
        curve = StepCurve.fit(samples)
        assert curve.per_context_token_s == pytest.approx(PER_CONTEXT_S, rel=0.15)
        assert curve.per_sequence_s == pytest.approx(PER_SEQUENCE_S, rel=0.6)
        for rows, sequences, context in ((4, 1, 100), (8, 4, 15_000), (16, 2, 3000), (12, 1, 8000)):
            truth = planted(rng, rows, sequences, context)[1]
            assert curve.seconds(rows, sequences, context) == pytest.approx(truth, rel=0.06)
        assert curve.shift is None


def test_longer_context_and_more_sequences_never_make_a_step_shorter() -> None:
    rng = random.Random(2)
    falling = [(4, 0.02 - 1e-6 * context, 1, context) for context in range(0, 9000, 100)]
    noise = [(rng.randrange(1, 9), rng.uniform(0.01, 0.1), 1, rng.randrange(5000)) for _ in range(200)]
    for samples in (falling, noise):
        curve = StepCurve.fit(samples)
        assert curve.per_context_token_s >= 0
        assert curve.per_sequence_s >= 0
        assert curve.seconds(8, 2, 4000) >= curve.seconds(8, 1, 1000) > 0
        assert curve.seconds(64, 1, 1000) >= curve.seconds(8, 1, 1000)


@pytest.mark.parametrize("factor", [0.5, 0.75, 1.3, 2.0, 4.0])
def test_a_machine_that_changed_is_noticed_within_some_tens_of_steps(factor: float) -> None:
    rng = random.Random(3)
    curve = StepCurve(half_life=1e6)  # nothing but the detection forgets
    for sample in load(rng, 300):
        curve.observe(*sample)
    assert curve.shift is None
    for sample in load(rng, 40, factor):
        curve.observe(*sample)
    assert curve.shift is not None
    assert curve.shift.factor == pytest.approx(factor, rel=0.15)
    for rows in (4, 8, 16):
        truth = factor * planted(rng, rows, 2, 4000)[1]
        assert curve.seconds(rows, 2, 4000) == pytest.approx(truth, rel=0.15)


def test_a_change_seen_at_one_row_count_moves_the_others_and_is_corrected_by_what_they_measure() -> None:
    rng = random.Random(4)
    curve = StepCurve(half_life=1e6)
    for _ in range(32):
        for rows in (1, 8):
            curve.observe(*planted(rng, rows, 1, 0))
    plain = curve.seconds(8)
    for _ in range(24):
        curve.observe(*planted(rng, 1, 1, 0, 2.0))
    assert curve.seconds(8) == pytest.approx(2 * plain, rel=0.1)
    for _ in range(12):
        curve.observe(*planted(rng, 8, 1, 0, 3.0))
    assert curve.seconds(8) == pytest.approx(3 * plain, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_outliers_alone_are_no_change(seed: int) -> None:
    rng = random.Random(seed)
    curve = StepCurve()
    truth = planted(rng, 8, 2, 4000)[1]
    for rows, seconds, sequences, context in load(rng, 400):
        is_outlier = rng.random() < 0.15
        curve.observe(rows, seconds * (rng.choice((3, 20)) if is_outlier else 1), sequences, context)
        if rng.random() < 0.1:
            assert curve.shift is None
    assert curve.seconds(8, 2, 4000) == pytest.approx(truth, rel=0.2)


def test_growing_context_is_taken_for_context_and_not_for_a_slower_machine() -> None:
    rng = random.Random(5)
    curve = StepCurve(max_samples=64)
    for context in range(0, 6400, 100):  # the target alone: one sequence whose text grows
        curve.observe(*planted(rng, 1, 1, context))
    assert curve.per_context_token_s == pytest.approx(PER_CONTEXT_S, rel=0.2)


@pytest.mark.parametrize("seed", range(10))
def test_noise_over_a_narrow_range_makes_no_slope(seed: int) -> None:
    rng = random.Random(seed)
    curve = StepCurve()
    for step in range(300):  # one text of 300 tokens, on a machine that others use too
        curve.observe(rng.choice((1, 5, 7)), 0.05 * rng.lognormvariate(0, 0.25), 1, 30 + step)
    assert curve.seconds(5, 1, 8000) < 2.5 * curve.seconds(5)


def test_a_change_of_the_machine_is_found() -> None:
    rng = random.Random(6)
    curve = StepCurve.fit([*load(rng, 100), *load(rng, 40, 2.0)])
    assert curve.shift is not None


def test_a_fit_is_not_negative_robust_and_falls_back_to_the_prior() -> None:
    rng = random.Random(7)
    x = [(1.0, float(k), float(n)) for k in range(1, 9) for n in range(1, 5)]
    y = [0.002 + 0.001 * k + 0.0005 * n for _, k, n in x]
    spoiled = [t * (20 if rng.random() < 0.1 else 1) for t in y]
    for targets in (y, spoiled):
        fitted = nonnegative_fit(x, targets, [1.0] * len(x), (0.0, 0.0, 0.0))
        assert fitted == pytest.approx((0.002, 0.001, 0.0005), rel=0.05)
    assert nonnegative_fit([], [], [], (0.1, 0.2)) == (0.1, 0.2)
    same = nonnegative_fit([(1.0, 4.0)] * 5, [0.01] * 5, [1.0] * 5, (None, 0.001))
    assert same == pytest.approx((0.006, 0.001), rel=1e-3)
    assert min(nonnegative_fit([(1.0, 1.0), (1.0, 2.0)], [2.0, 1.0], [1.0, 1.0], (0.0, 0.0))) >= 0


def test_medians_weigh() -> None:
    assert weighted_median([3.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 2.0
    assert weighted_median([3.0, 1.0], [5.0, 1.0]) == 3.0
    with pytest.raises(ValueError, match="no values"):
        weighted_median([], [])
    assert find_shift([1] * 10, [1.0] * 10) is None
