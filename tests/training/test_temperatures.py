"""Sequential temperature scaling: it finds how much too sure a head is, place by place."""

from __future__ import annotations

import pytest
import torch

from paceline.methods.dspark.temperatures import calibration_error, fit_temperatures, path_errors


def _chains(scales: list[float], count: int = 20000) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-odds that are too large by a factor at each place, and outcomes drawn from the true ones."""
    random = torch.Generator().manual_seed(3)
    true = torch.randn(count, len(scales), generator=random) + 1.0
    is_right = torch.rand(true.shape, generator=random) < torch.sigmoid(true)
    return true * torch.tensor(scales), is_right


def test_it_finds_the_scale_of_every_place() -> None:
    log_odds, is_right = _chains([3.0, 1.0, 0.5])
    temperatures = fit_temperatures(log_odds, is_right)
    assert temperatures == pytest.approx([3.0, 1.0, 0.5], rel=0.15)
    raw, scaled = (path_errors(log_odds, is_right, used) for used in ([1.0] * 3, temperatures))
    assert raw[0] > 0.08
    assert all(after < 0.015 for after in scaled)


def test_a_place_is_fitted_with_those_before_it_fixed() -> None:
    """A later place does not change an earlier one's temperature, and products are what is made right."""
    log_odds, is_right = _chains([2.0, 2.0])
    both = fit_temperatures(log_odds, is_right)
    assert fit_temperatures(log_odds[:, :1], is_right[:, :1]) == both[:1]
    confidences = torch.sigmoid(log_odds.double() / torch.tensor(both, dtype=torch.float64))
    accepted = is_right.all(1).double()
    assert float(calibration_error(confidences.prod(1), accepted)) == path_errors(log_odds, is_right, both)[1]


def test_nothing_to_learn_leaves_confidences_alone() -> None:
    assert fit_temperatures(torch.zeros(10, 1), torch.tensor([[True], [False]] * 5)) == [1.0]
    never = torch.full((1000, 2), -8.0)  # nothing is accepted, and nothing was promised
    assert fit_temperatures(never, torch.zeros(1000, 2, dtype=torch.bool)) == [1.0, 1.0]


def test_the_error_is_a_weighted_gap_of_bins() -> None:
    claimed = torch.tensor([0.11, 0.12, 0.91, 0.93], dtype=torch.float64)
    came = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    expected = (abs(0.23 - 1.0) + abs(1.84 - 2.0)) / 4
    assert float(calibration_error(claimed, came)) == pytest.approx(expected)
