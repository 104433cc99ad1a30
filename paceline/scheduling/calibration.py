"""Calibrates a drafter: from its probabilities to the probability that the target accepts its tokens.

Responsible for: an online estimate of a token's acceptance from the drafter's log-probability and the token's position,
and the calibration error before and after. Products of confidences along a path are calibrated too.

Deliberately does not know: token ids, tries, which drafter is calibrated, how confidences are used.

Called by: the verifier, with every draft that arrives and every tree that it verified. One calibrator serves one
drafter, on one thread.

1. Verified tokens are counted by (position, knot of the log-odds z of the drafter's probability). Counts decay.
2. After 256 trials a logistic regression on (1, z, hinges of z, position) is fitted to the counts
   (`acceptance_regression`). It is fitted again whenever trials have grown by a quarter, at most by 2048. The fit is
   tabulated over the knots, so that the confidence of a token costs one interpolation.
3. Every fourth round is held out from the counts. Over the newest held-out rounds one temperature for each position is
   chosen (`calibration_temperatures`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.scheduling.acceptance_regression import (
    IDENTITY,
    MAX_POSITIONS,
    NUM_KNOTS,
    FloatArray,
    fit_logistic,
    knot_of,
    logits_of,
    sigmoid,
)
from paceline.scheduling.calibration_error import CalibrationError
from paceline.scheduling.calibration_temperatures import FreshPaths, Node, fit_temperatures, fresh_paths

__all__ = ["AcceptanceSample", "CalibrationError", "Calibrator", "Node"]

_MIN_REFIT_TRIALS = 256
_MAX_REFIT_TRIALS = 2048
_HELD_OUT_EVERY = 4
_MIN_HELD_OUT_ROUNDS = 32
_MAX_HELD_OUT_ROUNDS = 512
_MAX_CONFIDENCE = 1 - 1e-6


@dataclass(frozen=True, slots=True)
class AcceptanceSample:
    """A trial: a verified token whose predecessors were all accepted.

    Attributes:
        position: in the draft, from 0.
        own: the drafter's probability.
        calibrated: the confidence that was used for it.
        is_accepted: whether the target accepted it.
    """

    position: int
    own: float
    calibrated: float
    is_accepted: bool


class Calibrator:
    """Calibrates one drafter.

    Before the first fit, after a few hundred trials, a confidence is the drafter's own probability.

    Args:
        half_life: trials after which an old one counts half.

    Attributes:
        own_error: calibration error of the drafter's probabilities, token by token.
        token_error: of the confidences that were used, token by token.
        path_error: of path acceptances, the products along paths, over all verified tokens.
    """

    def __init__(self, half_life: float = 8192.0) -> None:
        if not half_life > 0:
            raise ValueError(f"half_life must be above 0, got {half_life!r}")
        self.own_error = CalibrationError()
        self.token_error = CalibrationError()
        self.path_error = CalibrationError()
        self._half_life = half_life
        self._next_refit = _MIN_REFIT_TRIALS
        self._trials = [[0.0] * NUM_KNOTS for _ in range(MAX_POSITIONS)]
        self._accepts = [[0.0] * NUM_KNOTS for _ in range(MAX_POSITIONS)]
        self._num_new = 0
        self._num_rounds = 0
        self._held_out: deque[FreshPaths] = deque(maxlen=_MAX_HELD_OUT_ROUNDS)
        self._weights: FloatArray = IDENTITY
        self._temperatures: FloatArray = np.ones(MAX_POSITIONS)
        self._table: list[list[float]] = []
        self._is_fitted = False

    @property
    def temperatures(self) -> tuple[float, ...]:
        """By position; 1 changes nothing."""
        return tuple(self._temperatures.tolist())

    def confidence(self, log_prob: float, position: int) -> float:
        """P(the token is accepted, given that all tokens before it were).

        Args:
            log_prob: the drafter's log-probability, not above 0.
            position: in the draft, from 0.
        """
        if not self._is_fitted:
            return math.exp(min(log_prob, 0.0))
        knot = knot_of(log_prob)
        low = min(int(knot), NUM_KNOTS - 2)
        row = self._table[position if position < MAX_POSITIONS else -1]
        return row[low] + (row[low + 1] - row[low]) * (knot - low)

    def observe(self, nodes: Sequence[Node]) -> list[AcceptanceSample]:
        """Learn from one verified tree. Every so often a new fit is made, which takes a few milliseconds.

        Args:
            nodes: the tree's verified tokens, parents first.

        Returns:
            The trials among them, in the same order.
        """
        self._num_rounds += 1
        is_held_out = self._num_rounds % _HELD_OUT_EVERY == 0
        if is_held_out:
            self._held_out.append(fresh_paths(nodes))
        acceptance_samples: list[AcceptanceSample] = []
        for parent, log_prob, position, path_acceptance, is_accepted in nodes:
            if log_prob is None:
                continue
            self.path_error.observe(path_acceptance, is_accepted)
            if parent >= 0 and not nodes[parent].is_accepted:
                continue
            above = 1.0 if parent < 0 else nodes[parent].path_acceptance
            calibrated = min(path_acceptance / above, 1.0) if above > 0 else 0.0
            own = math.exp(log_prob)
            acceptance_samples.append(AcceptanceSample(position, own, calibrated, is_accepted))
            self.own_error.observe(own, is_accepted)
            self.token_error.observe(calibrated, is_accepted)
            if not is_held_out:
                knot = round(knot_of(log_prob))
                row = min(position, MAX_POSITIONS - 1)
                self._trials[row][knot] += 1.0
                self._accepts[row][knot] += is_accepted
                self._num_new += 1
        if self._num_new >= self._next_refit:
            self._refit()
        return acceptance_samples

    def _refit(self) -> None:
        decay = 2.0 ** (-self._num_new / self._half_life)
        self._num_new = 0
        trials, accepts = np.asarray(self._trials), np.asarray(self._accepts)  # [positions, knots]
        self._weights = fit_logistic(trials, accepts, self._weights)
        logits = logits_of(self._weights)
        if len(self._held_out) >= _MIN_HELD_OUT_ROUNDS:
            self._temperatures = fit_temperatures(self._held_out, logits)
        table = sigmoid(logits / self._temperatures[:, None])
        self._table = np.minimum(table, _MAX_CONFIDENCE).tolist()
        self._is_fitted = True
        self._trials = (trials * decay).tolist()
        self._accepts = (accepts * decay).tolist()
        self._next_refit = max(_MIN_REFIT_TRIALS, min(int(trials.sum()) // 4, _MAX_REFIT_TRIALS))
