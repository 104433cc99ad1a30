"""Pearson's chi-square of counts against expectations."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch


def path_acceptance(
    counts: Mapping[Hashable, int], expected: Mapping[Hashable, float], smallest: float = 5.0
) -> float:
    """Probability of a statistic at least this large; cells with small expectations are pooled.

    Args:
        counts: how often each outcome came.
        expected: how often it should have; the total is the counts'.
        smallest: expectation below which a cell joins the pool.

    Raises:
        AssertionError: an outcome came that cannot.
    """
    assert all(expected.get(outcome, 0) > 0 for outcome in counts), "an impossible outcome"
    pairs = [(counts.get(outcome, 0), wanted) for outcome, wanted in expected.items() if wanted >= smallest]
    rare = [(counts.get(outcome, 0), wanted) for outcome, wanted in expected.items() if 0 < wanted < smallest]
    if rare:
        pairs.append((sum(found for found, _ in rare), sum(wanted for _, wanted in rare)))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
