"""Speculation under load: what it brings to all sequences of a target together.

Responsible for: tokens per second of a set of lengths, the batch size at which speculation stops paying, and
the capacity and cost of drafting elsewhere.

Deliberately does not know: single tokens, networks, how lengths are chosen (`paceline.scheduling.budget`).

Source: DSpark, arXiv 2607.05147, Algorithm 1, for Theta; Speculation at a Distance, arXiv 2606.25091, for
capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from experiments.theory.parameters import CycleParams
from experiments.theory.synchronous import chain_tokens


def throughput(
    path_acceptances: Sequence[Sequence[float]], lengths: Sequence[int], step_time: Callable[[int], float]
) -> float:
    """Theta = (n + sum over i, j <= l_i of s_ij) / T(n + sum of l_i), tokens per second.

    Args:
        path_acceptances: per sequence, the chance that its j-th node and all above it are accepted.
        lengths: nodes verified of each sequence.
        step_time: seconds of a step over that many rows.
    """
    chosen = [values[:length] for values, length in zip(path_acceptances, lengths, strict=True)]
    num_tokens = len(chosen) + math.fsum(path_acceptance for values in chosen for path_acceptance in values)
    return num_tokens / step_time(len(chosen) + sum(map(len, chosen)))


def batch_speedup(params: CycleParams, num_sequences: int) -> float:
    """Speed over plain decoding of n sequences that all draft g tokens for nothing: E(g) v(n) / v(n (g + 1))."""
    tokens = chain_tokens(params.acceptance, params.draft_length)
    rows = num_sequences * (params.draft_length + 1)
    return tokens * params.verify_cost(num_sequences) / params.verify_cost(rows)


def break_even_batch(params: CycleParams, max_sequences: int = 4096) -> int:
    """The largest n up to which verification pays at every batch: v(n (g + 1)) / v(n) < E(g). 0 where it never does."""
    for num_sequences in range(1, max_sequences + 1):
        if batch_speedup(params, num_sequences) <= 1:
            return num_sequences - 1
    return max_sequences


def capacity_gain(params: CycleParams) -> float:
    """How many times as many clients a saturated target serves once drafting moves elsewhere: 1 + g c."""
    return 1 + params.drafting


def gain_per_cost(params: CycleParams, price_ratio: float, drafter_fraction: float) -> float:
    """`capacity_gain` over its cost: (1 + g c) / (1 + price ratio x drafter fraction).

    Args:
        params: the cycle.
        price_ratio: price of a drafter's device over that of the target's.
        drafter_fraction: drafter devices per target device.
    """
    if price_ratio < 0 or drafter_fraction < 0:
        raise ValueError("price_ratio and drafter_fraction must not be negative")
    return capacity_gain(params) / (1 + price_ratio * drafter_fraction)
