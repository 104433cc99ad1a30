"""Which outcomes of a verification step are likely, and how many of them a hit rate takes.

Responsible for: ranking the pairs (accepted draft tokens, the target's own token) by their probability.

Deliberately does not know: token ids, times, how far past an outcome is drafted.

Called by: `inputs`, for the hit rate of a speculation cache (SSD, arXiv 2603.03251); the replay of planner traces.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VerificationOutcome:
    """What a step may commit.

    Attributes:
        num_accepted: drafted tokens that are accepted.
        choice: rank of the target's own token among the drafter's choices, 0 for its first choice.
        chance: probability of this outcome.
    """

    num_accepted: int
    choice: int
    chance: float


def likeliest_outcomes(
    acceptance: Sequence[float], sibling_acceptance: float, draft_length: int, max_outcomes: int
) -> tuple[VerificationOutcome, ...]:
    """The likeliest verification outcomes of a step, likeliest first.

    An outcome is the number of accepted tokens out of g, and the target's own token after them. With
    probability path acceptance(m) (1 - a_{m+1}) exactly m < g tokens are accepted. The drafter's first choice
    was rejected there, so the target's token is its second choice, its third, and so on. If all g tokens are
    accepted, the token is the drafter's first choice with probability a_{g+1}, or a later one. So most outcomes
    lie where a rejection is likely, geometrically fewer elsewhere (the fan-out of arXiv 2603.03251).

    Args:
        acceptance: conditional acceptance per position, from the first of the draft; positions beyond the last
            repeat it.
        sibling_acceptance: chance that a further choice is the target's token, given that all choices before it
            were not.
        draft_length: `g`, tokens of the draft being verified.
        max_outcomes: how many to list.
    """
    if not acceptance:
        return ()
    # (minus the next choice's chance, accepted, that choice, probability left after it)
    branches: list[tuple[float, int, int, float]] = []
    path_acceptance = 1.0
    for position in range(draft_length + 1):
        rate = acceptance[min(position, len(acceptance) - 1)]
        rejected = path_acceptance * (1 - rate)
        branches.append((-rejected * sibling_acceptance, position, 1, rejected * (1 - sibling_acceptance)))
        path_acceptance *= rate
    branches.append((-path_acceptance, draft_length, 0, 0.0))
    heapq.heapify(branches)
    found: list[VerificationOutcome] = []
    while len(found) < max_outcomes:
        negative_chance, num_accepted, choice, left = branches[0]
        if choice == 0:
            heapq.heappop(branches)
        else:
            further = (-left * sibling_acceptance, num_accepted, choice + 1, left * (1 - sibling_acceptance))
            heapq.heapreplace(branches, further)
        found.append(VerificationOutcome(num_accepted, choice, -negative_chance))
    return tuple(found)


def outcome_hit_rates(
    acceptance: Sequence[float], sibling_acceptance: float, draft_length: int, max_outcomes: int
) -> tuple[float, ...]:
    """Chance that a step's outcome is among the likeliest 1, 2, .. `max_outcomes` (see `likeliest_outcomes`).

    Returns:
        `max_outcomes` chances; they do not fall and do not exceed 1.
    """
    if not acceptance:
        return (0.0,) * max_outcomes
    outcomes = likeliest_outcomes(acceptance, sibling_acceptance, draft_length, max_outcomes)
    return tuple(min(total, 1.0) for total in itertools.accumulate(outcome.chance for outcome in outcomes))
