"""From what a drafter says of its tokens to the probability that the target accepts them.

Responsible for: an online logistic estimate of a token's acceptance from the drafter's log-probability and the token's
position in the draft, sequential temperatures over it so that products along paths are calibrated too, and the expected
calibration error before and after.

Deliberately does not know: tokens, tries, which drafter it serves, how its estimates are used.

Called by: the verifier, with every draft that comes in and everything it verifies; one calibrator for each drafter, on
one thread.

1. What was verified is counted over (position, knot of the log-odds z of the drafter's probability), decayed.
2. After `refit_trials` trials, and then whenever there are a quarter more, at most 2048, a logistic regression on
   (1, z, hinges of z, position) is fitted to the counts by Newton's method with a ridge towards the identity, and
   written into a table over the knots. A token costs an interpolation.
3. Every fourth round is held out from 1. Over the newest of these the temperatures are chosen, position after position:
   T_k minimises the expected calibration error of the product of sigmoid(logit_i / T_i) along the path, i <= k, with
   earlier ones fixed (sequential temperature scaling, DSpark, arXiv 2607.05147, section 4), pulled towards 1 while
   there is little to choose from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.scheduling.reliability import NUM_BINS, bin_of

FloatArray = npt.NDArray[np.float64]

MAX_POSITIONS = 16
"""Deeper tokens are taken for those at the last of these positions."""
_MAX_LOG_ODDS = 10.0
_KNOTS_PER_UNIT = 2
_NUM_KNOTS = int(2 * _MAX_LOG_ODDS) * _KNOTS_PER_UNIT + 1
_Z: FloatArray = np.linspace(-_MAX_LOG_ODDS, _MAX_LOG_ODDS, _NUM_KNOTS)
_HINGES = (
    -5.0,
    -3.0,
    -1.0,
    1.0,
    3.0,
)  # of the log-odds: under shared noise acceptance is far from a line in them
_NUM_NEWTON_STEPS = 8
_MAX_REFIT_TRIALS = 2048
_RIDGES = (
    0.05,
    0.5,
    *(0.5 for _ in _HINGES),
)  # of intercept, slope and hinges: a few hundred trials outweigh them
_POSITION_RIDGE = 8.0
_HELD_OUT_EVERY = 4
_MIN_HELD_OUT_ROUNDS = 32
_TEMPERATURES: FloatArray = np.exp(np.linspace(math.log(0.5), math.log(2.0), 21))
_TEMPERATURE_PULL = 0.2  # of error per unit of log-temperature, for 100 nodes; falls as they grow
_MAX_CONFIDENCE = 1 - 1e-6


class Node(NamedTuple):
    """A verified token.

    Attributes:
        parent: its parent's place among the round's nodes, smaller than its own; -1 for the committed text.
        log_prob: what the drafter said of it, None where it said nothing.
        position: in the draft, from 0.
        path_acceptance: the product of confidences from the committed text down to it, as it was used.
        is_accepted: whether the target accepted it, and with it all before it.
    """

    parent: int
    log_prob: float | None
    position: int
    path_acceptance: float
    is_accepted: bool


@dataclass(frozen=True, slots=True)
class AcceptanceSample:
    """A trial: a verified token with all before it accepted.

    Attributes:
        position: in the draft, from 0.
        own: the drafter's probability.
        calibrated: the confidence that was used for it.
    """

    position: int
    own: float
    calibrated: float
    is_accepted: bool


class CalibrationError:
    """Expected calibration error over 20 fixed bins, decayed.

    Args:
        half_life: observations after which an old one counts half.
    """

    def __init__(self, half_life: float = 16384.0) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0  # of the next observation: growing weights are decaying ones up to a factor
        self._confidences = [0.0] * NUM_BINS
        self._accepted = [0.0] * NUM_BINS
        self._total = 0.0
        self.count = 0

    def observe(self, confidence: float, is_accepted: bool) -> None:
        """Add one."""
        weight = self._weight
        place = bin_of(confidence)
        self._confidences[place] += weight * confidence
        self._accepted[place] += weight * is_accepted
        self._total += weight
        self.count += 1
        self._weight = weight * self._growth
        if self._weight > 1e12:
            scale = 1.0 / self._weight
            self._confidences = [value * scale for value in self._confidences]
            self._accepted = [value * scale for value in self._accepted]
            self._total *= scale
            self._weight = 1.0

    @property
    def value(self) -> float:
        """From 0 to 1; 0 without observations."""
        if not self._total:
            return 0.0
        gaps = zip(self._confidences, self._accepted, strict=True)
        return math.fsum(abs(claimed - came) for claimed, came in gaps) / self._total


class Calibrator:
    """Calibrates one drafter; before the first few hundred trials it gives the drafter's probabilities as they are.

    Args:
        half_life: trials after which an old one counts half.
        refit_trials: trials before the first fit, and at least between two.
        num_held_out: held-out rounds that temperatures are chosen on.

    Attributes:
        own_error: of the drafter's probabilities, token by token.
        token_error: of the confidences that were used, token by token.
        path_error: of path acceptances, the products along paths, over all verified tokens.
    """

    def __init__(self, half_life: float = 8192.0, refit_trials: int = 256, num_held_out: int = 512) -> None:
        if not half_life > 0 or refit_trials < 1 or num_held_out < 1:
            raise ValueError("half_life, refit_trials and num_held_out must be above 0")
        self.own_error = CalibrationError()
        self.token_error = CalibrationError()
        self.path_error = CalibrationError()
        self._half_life = half_life
        self._refit_trials = refit_trials
        self._next_refit = refit_trials
        self._trials = [[0.0] * _NUM_KNOTS for _ in range(MAX_POSITIONS)]
        self._accepts = [[0.0] * _NUM_KNOTS for _ in range(MAX_POSITIONS)]
        self._num_new = 0
        self._num_rounds = 0
        self._held_out: deque[_FreshPaths] = deque(maxlen=num_held_out)
        self._weights: FloatArray = _IDENTITY
        self._temperatures: FloatArray = np.ones(MAX_POSITIONS)
        self._table: list[list[float]] = []
        self._is_fitted = False

    @property
    def temperatures(self) -> tuple[float, ...]:
        """By position; 1 changes nothing."""
        return tuple(self._temperatures.tolist())

    def confidence(self, log_prob: float, position: int) -> float:
        """P(the token is accepted, given that all before it were).

        Args:
            log_prob: the drafter's, not above 0.
            position: in the draft, from 0.
        """
        if not self._is_fitted:
            return math.exp(min(log_prob, 0.0))
        place = (_log_odds(log_prob) + _MAX_LOG_ODDS) * _KNOTS_PER_UNIT
        low = min(int(place), _NUM_KNOTS - 2)
        row = self._table[position if position < MAX_POSITIONS else -1]
        return row[low] + (row[low + 1] - row[low]) * (place - low)

    def observe(self, nodes: Sequence[Node]) -> list[AcceptanceSample]:
        """Learn from one verified tree; its trials, in order.

        Every so often this fits anew, which takes a few milliseconds.
        """
        self._num_rounds += 1
        is_held_out = self._num_rounds % _HELD_OUT_EVERY == 0
        if is_held_out:
            self._held_out.append(_fresh_paths(nodes))
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
                knot = round((_log_odds(log_prob) + _MAX_LOG_ODDS) * _KNOTS_PER_UNIT)
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
        self._weights = _fit_logistic(trials, accepts, self._weights)
        logits = _logits(self._weights)
        if len(self._held_out) >= _MIN_HELD_OUT_ROUNDS:
            self._temperatures = _fit_temperatures(self._held_out, logits)
        table = _sigmoid(logits / self._temperatures[:, None])
        self._table = np.minimum(table, _MAX_CONFIDENCE).tolist()
        self._is_fitted = True
        self._trials = (trials * decay).tolist()
        self._accepts = (accepts * decay).tolist()
        self._next_refit = max(self._refit_trials, min(int(trials.sum()) // 4, _MAX_REFIT_TRIALS))


def _log_odds(log_prob: float) -> float:
    """z of a probability, within the knots."""
    if log_prob >= -4.6e-5:  # below, 1 - p is above 4.5e-5 and z below 10
        return _MAX_LOG_ODDS
    if not log_prob > -_MAX_LOG_ODDS:  # also true for NaN, which drafts are refused for later
        return -_MAX_LOG_ODDS
    return max(log_prob - math.log(-math.expm1(log_prob)), -_MAX_LOG_ODDS)


def _sigmoid(x: FloatArray) -> FloatArray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _design() -> FloatArray:
    """`[positions * knots, 2 + hinges + positions]`: 1, z, hinges, and which position."""
    z = np.tile(_Z, MAX_POSITIONS)
    which = np.repeat(np.eye(MAX_POSITIONS), _NUM_KNOTS, axis=0)
    hinges = [np.maximum(z - hinge, 0.0) for hinge in _HINGES]
    return np.column_stack([np.ones_like(z), z, *hinges, which])


_DESIGN = _design()
_RIDGE: FloatArray = np.concatenate([_RIDGES, np.full(MAX_POSITIONS, _POSITION_RIDGE)])
_IDENTITY: FloatArray = np.concatenate([[0.0, 1.0], np.zeros(len(_HINGES) + MAX_POSITIONS)])


def _logits(weights: FloatArray) -> FloatArray:
    """`[positions, knots]`, never falling in z: a likelier token is not taken for a worse one."""
    logits = (_DESIGN @ weights).reshape(MAX_POSITIONS, _NUM_KNOTS)
    return np.maximum.accumulate(logits, axis=1)


def _fit_logistic(trials: FloatArray, accepts: FloatArray, start: FloatArray) -> FloatArray:
    """Newton's method on the penalised log-likelihood of binomial counts; the best point it came by."""
    n, k = trials.ravel(), accepts.ravel()
    seen = n > 0
    x, n, k = _DESIGN[seen], n[seen], k[seen]

    def loss(weights: FloatArray) -> float:
        logits = x @ weights
        likelihood = float(np.sum(k * logits - n * np.logaddexp(0.0, logits)))
        return 0.5 * float(_RIDGE @ (weights - _IDENTITY) ** 2) - likelihood

    weights, best = start, loss(start)
    for _ in range(_NUM_NEWTON_STEPS):
        p = _sigmoid(x @ weights)
        gradient = x.T @ (n * p - k) + _RIDGE * (weights - _IDENTITY)
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


class _FreshPaths(NamedTuple):
    """Nodes of one round, `[nodes]` each, that lie as deep in their draft as in their tree.

    Late drafts hang lower, and start in the middle: what came before their first node is not known.
    """

    parents: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    places: FloatArray  # among the knots
    accepted: FloatArray


def _fresh_paths(nodes: Sequence[Node]) -> _FreshPaths:
    parents: list[int] = []
    positions: list[int] = []
    places: list[float] = []
    accepted: list[bool] = []
    kept: dict[int, int] = {}
    for index, node in enumerate(nodes):
        above = -1 if node.parent < 0 else kept.get(node.parent, -2)
        depth = 0 if above < 0 else positions[above] + 1
        if node.log_prob is None or above == -2 or node.position != depth or depth >= MAX_POSITIONS:
            continue
        kept[index] = len(parents)
        parents.append(above)
        positions.append(depth)
        places.append((_log_odds(node.log_prob) + _MAX_LOG_ODDS) * _KNOTS_PER_UNIT)
        accepted.append(node.is_accepted)
    return _FreshPaths(
        np.asarray(parents, dtype=np.int64),
        np.asarray(positions, dtype=np.int64),
        np.asarray(places, dtype=np.float64),
        np.asarray(accepted, dtype=np.float64),
    )


def _fit_temperatures(rounds: Sequence[_FreshPaths] | deque[_FreshPaths], logits: FloatArray) -> FloatArray:
    """`[positions]`: sequential temperature scaling over held-out rounds."""
    temperatures = np.ones(MAX_POSITIONS)
    position = np.concatenate([paths.positions for paths in rounds])
    if not len(position):
        return temperatures
    offsets = np.cumsum([0, *(len(paths.parents) for paths in rounds)])
    parent = np.concatenate(
        [
            np.where(paths.parents < 0, -1, paths.parents + offset)
            for paths, offset in zip(rounds, offsets[:-1], strict=True)
        ]
    )
    place = np.concatenate([paths.places for paths in rounds])
    came = np.concatenate([paths.accepted for paths in rounds])
    low = np.minimum(place.astype(np.int64), _NUM_KNOTS - 2)
    part = place - low
    logit = logits[position, low] * (1 - part) + logits[position, low + 1] * part  # [nodes]
    path_acceptance = np.ones(
        len(parent) + 1
    )  # the last stands for the committed text, which parent -1 finds
    for depth in range(int(position.max()) + 1):
        here = np.flatnonzero(position == depth)
        above = path_acceptance[parent[here]]
        candidates = above * _sigmoid(logit[here] / _TEMPERATURES[:, None])  # [temperatures, nodes here]
        bins = np.minimum((candidates * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        flat = (bins + NUM_BINS * np.arange(len(_TEMPERATURES))[:, None]).ravel()
        gaps = np.bincount(
            flat, weights=(candidates - came[here]).ravel(), minlength=NUM_BINS * len(_TEMPERATURES)
        )
        errors = np.abs(gaps).reshape(len(_TEMPERATURES), NUM_BINS).sum(axis=1) / len(here)
        pull = _TEMPERATURE_PULL * np.abs(np.log(_TEMPERATURES)) * math.sqrt(100.0 / len(here))
        chosen = int(np.argmin(errors + pull))
        temperatures[depth] = _TEMPERATURES[chosen]
        path_acceptance[here] = candidates[chosen]
    return temperatures
