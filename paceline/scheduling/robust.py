"""Fits that a few outliers do not move, and the point in a series where the level changed.

Responsible for: weighted medians, a non-negative linear fit, and a change point in log-ratios.

Deliberately does not know: what is measured.

Called by: `curve_fit` and `draft_times`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_MAD_TO_SIGMA = 1.4826
_SIGNIFICANT = 3.0  # standard errors
_REJECT = 5.0  # in units of the scale: the last iterations leave out larger residuals
_NUM_ITERATIONS = 24
_NUM_ABSOLUTE_ITERATIONS = 16
_SMALLEST_RESIDUAL = 1e-3  # of the scale of residuals: bounds the weight of a sample that fits exactly
_RIDGE = 1e-6  # decides only between coefficients that the samples do not distinguish

MIN_SHIFT_SAMPLES = 16
"""Samples after a change before it is believed."""
MIN_SHIFT = math.log(1.15)
"""The least change that counts: 15%, in either direction."""
_MIN_BEFORE = 32  # samples before a change: with fewer, a few outliers among them look like a change
_MIN_GROUP_BEFORE = 8  # samples before a change in a group, for its median to be used
_SHIFT_FRACTION = 0.75  # of the samples after a change that must lie beyond MIN_SHIFT on one side


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The smallest value at which half of the weight is reached.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values: a median needs at least one")
    ranked = sorted(zip(values, weights, strict=True))
    half = sum(weights) / 2
    reached = 0.0
    for value, weight in ranked:
        reached += weight
        if reached >= half:
            return value
    return ranked[-1][0]


def nonnegative_fit(
    features: Sequence[Sequence[float]],
    targets: Sequence[float],
    weights: Sequence[float],
    prior: Sequence[float | None],
) -> tuple[float, ...]:
    """Non-negative coefficients: least absolute deviations first, then least squares without the residuals far
    outside.

    Both use iteratively reweighted least squares (Holland and Welsch, 1977). Least absolute deviations tolerate
    a quarter of outliers on one side. Least squares over the rest then use the remaining samples better.

    Args:
        features: `[samples, coefficients]`, at most 6 coefficients.
        targets: `[samples]`.
        weights: `[samples]`, not negative.
        prior: `[coefficients]`, the value where the samples do not decide; None for the coefficient that takes
            the rest.

    Returns:
        `[coefficients]`; the prior where there are no samples.
    """
    num_coefficients = len(prior)
    if not targets:
        return tuple(value or 0.0 for value in prior)
    x = np.asarray(features, dtype=np.float64).reshape(len(targets), num_coefficients)
    y = np.asarray(targets, dtype=np.float64)
    base = np.asarray(weights, dtype=np.float64)
    guess = np.asarray([value or 0.0 for value in prior], dtype=np.float64)
    is_held = np.asarray([value is not None for value in prior])
    robust = np.ones_like(y)
    fitted = guess
    for iteration in range(_NUM_ITERATIONS):
        before = fitted
        fitted = _nonnegative_least_squares(x, y, base * robust, guess, is_held)
        residuals = np.abs(y - x @ fitted)
        scale = _MAD_TO_SIGMA * weighted_median(residuals.tolist(), base.tolist())
        if scale <= 1e-12 * float(np.abs(y).max()):
            break
        if iteration < _NUM_ABSOLUTE_ITERATIONS:
            robust = scale / np.maximum(residuals, _SMALLEST_RESIDUAL * scale)
        elif np.allclose(before, fitted, rtol=1e-6, atol=0.0):
            break
        else:
            robust = (residuals <= _REJECT * scale).astype(np.float64)
    return tuple(float(value) for value in fitted)


def shrunken(
    features: Sequence[Sequence[float]],
    targets: Sequence[float],
    weights: Sequence[float],
    coefficients: Sequence[float],
) -> tuple[float, ...]:
    """Coefficients reduced by what noise alone may have contributed.

    Each is multiplied by 1 - (3 / t)^2, and is 0 for t below 3, where t is its ratio to its standard error (as
    in the non-negative garrote, Breiman, 1995). So a slope over a narrow range is not extrapolated to far
    values.

    Args:
        features, targets, weights: as `nonnegative_fit` was given; the features centred.
        coefficients: the result of that fit.
    """
    x = np.asarray(features, dtype=np.float64).reshape(len(targets), len(coefficients))
    fitted = np.asarray(coefficients, dtype=np.float64)
    base = np.asarray(weights, dtype=np.float64)
    if not base.sum():
        return tuple(0.0 for _ in coefficients)
    residuals = np.abs(np.asarray(targets, dtype=np.float64) - x @ fitted)
    scale = _MAD_TO_SIGMA * weighted_median(residuals.tolist(), base.tolist())
    # Weights are relative to the newest sample, which counts as one sample.
    gram = x.T @ (x * (base / base.max())[:, None])
    variances = scale**2 * np.diag(np.linalg.pinv(gram))
    ratios = _SIGNIFICANT**2 * variances / np.maximum(fitted**2, 1e-300)
    return tuple(float(value) for value in fitted * np.maximum(1.0 - ratios, 0.0))


def _nonnegative_least_squares(
    x: FloatArray, y: FloatArray, weights: FloatArray, prior: FloatArray, is_held: npt.NDArray[np.bool_]
) -> FloatArray:
    """Exact: every set of coefficients at zero is tried, since there are few of them."""
    num_coefficients = x.shape[1]
    gram = x.T @ (x * weights[:, None])
    moment = x.T @ (y * weights)
    ridge = _RIDGE * np.maximum(np.diag(gram), 1e-300) * is_held
    gram = gram + np.diag(ridge)
    moment = moment + ridge * prior
    best, best_loss = np.zeros(num_coefficients), 0.0
    for size in range(num_coefficients, 0, -1):
        for free in itertools.combinations(range(num_coefficients), size):
            chosen = list(free)
            try:
                solved = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            except np.linalg.LinAlgError:
                continue
            if bool((solved < 0).any()):
                continue
            loss = float(solved @ gram[np.ix_(chosen, chosen)] @ solved - 2 * solved @ moment[chosen])
            if loss < best_loss:
                best_loss = loss
                best = np.zeros(num_coefficients)
                best[chosen] = solved
        if best_loss < 0 and size == num_coefficients:
            break  # the unconstrained minimum is feasible: nothing beats it
    return best


@dataclass(frozen=True, slots=True)
class Shift:
    """A lasting change in a series.

    Attributes:
        start: index of the first sample after the change.
        factor: by how much everything takes longer since; below 1 where it became faster.
    """

    start: int
    factor: float


def find_shift(groups: Sequence[int], values: Sequence[float]) -> Shift | None:
    """The clearest lasting change of all groups by one factor, or None.

    Candidates are changes 16, 24, 32, 48, ... samples ago. Each sample after a candidate is compared with the
    median of its group before it. The change counts where three quarters of these ratios lie on one side of
    15%: outliers alone, however large, do not suffice. Of the changes that count the best explanation is taken:
    the least sum of absolute log-ratios to the medians on either side (an L1 change point).

    Args:
        groups: which samples are comparable, such as a bucket of rows, in order of time.
        values: the samples, above 0.
    """
    num_samples = len(values)
    logs = [math.log(value) for value in values]
    best: Shift | None = None
    best_cost = math.inf
    span = MIN_SHIFT_SAMPLES
    while span <= num_samples - _MIN_BEFORE:
        start = num_samples - span
        span += max(8, span // 2 // 8 * 8)
        before: dict[int, list[float]] = {}
        for group, value in zip(groups[:start], logs[:start], strict=True):
            before.setdefault(group, []).append(value)
        medians = {
            group: _median(members) for group, members in before.items() if len(members) >= _MIN_GROUP_BEFORE
        }
        ratios = [
            value - medians[group]
            for group, value in zip(groups[start:], logs[start:], strict=True)
            if group in medians
        ]
        if len(ratios) < MIN_SHIFT_SAMPLES:
            continue
        slower = sum(ratio > MIN_SHIFT for ratio in ratios)
        faster = sum(ratio < -MIN_SHIFT for ratio in ratios)
        if max(slower, faster) < _SHIFT_FRACTION * len(ratios):
            continue
        step = _median(ratios)
        cost = sum(abs(ratio - step) for ratio in ratios) + sum(
            abs(value - medians[group])
            for group, value in zip(groups[:start], logs[:start], strict=True)
            if group in medians
        )
        if cost < best_cost:
            best, best_cost = Shift(start, math.exp(step)), cost
    return best


def _median(values: list[float]) -> float:
    ranked = sorted(values)
    return ranked[len(ranked) // 2] if len(ranked) % 2 else sum(ranked[len(ranked) // 2 - 1 :][:2]) / 2
