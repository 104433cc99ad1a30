"""Logistic regression of a token's acceptance on the drafter's log-odds and the token's position.

Responsible for: the knots that counts are kept at, the design matrix, and Newton's method with a ridge.

Deliberately does not know: where counts come from, temperatures.

Called by: `calibration.Calibrator`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MAX_POSITIONS = 16
"""Deeper tokens count as tokens at the last of these positions."""
MAX_LOG_ODDS = 10.0
_KNOTS_PER_UNIT = 2
NUM_KNOTS = int(2 * MAX_LOG_ODDS) * _KNOTS_PER_UNIT + 1
_Z: FloatArray = np.linspace(-MAX_LOG_ODDS, MAX_LOG_ODDS, NUM_KNOTS)
# Hinges of the log-odds: with coupled noise acceptance is far from a line in them.
_HINGES = (-5.0, -3.0, -1.0, 1.0, 3.0)
_NUM_NEWTON_STEPS = 8
# Of intercept, slope and hinges. A few hundred trials outweigh them.
_RIDGES = (0.05, 0.5, *(0.5 for _ in _HINGES))
_POSITION_RIDGE = 8.0


def knot_of(log_prob: float) -> float:
    """The position of a probability's log-odds among the knots, from 0 to `NUM_KNOTS` - 1; whole numbers are knots."""
    if log_prob >= -4.6e-5:  # 1 - p is below 4.6e-5, so that z is about 10 or more
        return NUM_KNOTS - 1.0
    if not log_prob > -MAX_LOG_ODDS:  # also true for NaN; such drafts are refused later
        return 0.0
    z = max(log_prob - math.log(-math.expm1(log_prob)), -MAX_LOG_ODDS)
    return (z + MAX_LOG_ODDS) * _KNOTS_PER_UNIT


def sigmoid(x: FloatArray) -> FloatArray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _design() -> FloatArray:
    """`[positions * knots, 2 + hinges + positions]`: 1, z, hinges, and which position."""
    z = np.tile(_Z, MAX_POSITIONS)
    which = np.repeat(np.eye(MAX_POSITIONS), NUM_KNOTS, axis=0)
    hinges = [np.maximum(z - hinge, 0.0) for hinge in _HINGES]
    return np.column_stack([np.ones_like(z), z, *hinges, which])


_DESIGN = _design()
_RIDGE: FloatArray = np.concatenate([_RIDGES, np.full(MAX_POSITIONS, _POSITION_RIDGE)])
IDENTITY: FloatArray = np.concatenate([[0.0, 1.0], np.zeros(len(_HINGES) + MAX_POSITIONS)])


def logits_of(weights: FloatArray) -> FloatArray:
    """`[positions, knots]`, made non-decreasing in z: a likelier token never gets a lower confidence."""
    logits = (_DESIGN @ weights).reshape(MAX_POSITIONS, NUM_KNOTS)
    return np.maximum.accumulate(logits, axis=1)


def fit_logistic(trials: FloatArray, accepts: FloatArray, start: FloatArray) -> FloatArray:
    """Newton's method on the penalised log-likelihood of binomial counts.

    Args:
        trials: `[positions, knots]`, decayed counts.
        accepts: `[positions, knots]`, not above `trials`.
        start: weights to start from.

    Returns:
        The weights of the best point that was visited.
    """
    n, k = trials.ravel(), accepts.ravel()
    seen = n > 0
    x, n, k = _DESIGN[seen], n[seen], k[seen]

    def loss(weights: FloatArray) -> float:
        logits = x @ weights
        likelihood = float(np.sum(k * logits - n * np.logaddexp(0.0, logits)))
        return 0.5 * float(_RIDGE @ (weights - IDENTITY) ** 2) - likelihood

    weights, best = start, loss(start)
    for _ in range(_NUM_NEWTON_STEPS):
        p = sigmoid(x @ weights)
        gradient = x.T @ (n * p - k) + _RIDGE * (weights - IDENTITY)
        hessian = x.T @ (x * (n * p * (1 - p))[:, None]) + np.diag(_RIDGE)
        step = np.linalg.solve(hessian, gradient)
        scale = 1.0
        while scale > 1e-3 and loss(weights - scale * step) > best:
            scale /= 2
        if scale <= 1e-3:
            break
        weights = weights - scale * step
        best = loss(weights)
    return weights
