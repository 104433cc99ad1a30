"""Sequential temperature scaling of a confidence head on held-out chains (DSpark, 2607.05147, section 4).

Raw confidences are too high. One temperature for each place of a chain, chosen in order, calibrates the *products*
along a chain, by which the number of tokens to verify is chosen. The order of confidences at one place does not change.
Pure functions; called by :mod:`paceline.methods.dspark.objective`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NUM_BINS = 20
_SLACK = 1e-3  # smaller gains in calibration error do not justify a temperature further from 1
_GRID = torch.linspace(math.log(0.2), math.log(5.0), 65, dtype=torch.float64).exp()


def fit_temperatures(log_odds: Tensor, is_right: Tensor) -> list[float]:
    """A temperature for each place, the first's first, each with those before it fixed.

    Args:
        log_odds: ``[chains, places]``, of each token's acceptance once those before it were accepted.
        is_right: bool ``[chains, places]``: whether each token is the target's.

    Returns:
        Temperatures, at each place the one nearest to 1 of those whose calibration error is about the least.
    """
    accepted = is_right.cumprod(1).double()
    above = torch.ones(log_odds.shape[0], dtype=torch.float64)
    by_distance = _GRID[_GRID.log().abs().argsort(stable=True)]
    temperatures = []
    for place in range(log_odds.shape[1]):
        candidates = above * torch.sigmoid(log_odds[:, place].double() / by_distance[:, None])
        errors = torch.stack([calibration_error(claimed, accepted[:, place]) for claimed in candidates])
        chosen = int((errors <= errors.min() + _SLACK).nonzero()[0])
        temperatures.append(float(by_distance[chosen]))
        above = candidates[chosen]
    return temperatures


def path_errors(log_odds: Tensor, is_right: Tensor, temperatures: list[float]) -> list[float]:
    """Calibration error of the product up to each place, with these temperatures."""
    confidences = torch.sigmoid(log_odds.double() / torch.tensor(temperatures, dtype=torch.float64))
    claimed, accepted = confidences.cumprod(1), is_right.cumprod(1).double()
    return [float(calibration_error(claimed[:, k], accepted[:, k])) for k in range(log_odds.shape[1])]


def calibration_error(claimed: Tensor, came: Tensor) -> Tensor:
    """Expected calibration error over 20 equal bins.

    Args:
        claimed: float64 ``[n]``, from 0 to 1.
        came: float64 ``[n]``, 0 or 1.
    """
    bins = (claimed * NUM_BINS).long().clamp_max(NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64).index_add_(0, bins, claimed - came)
    return gaps.abs().sum() / claimed.shape[0]
