"""Drafting past every likely outcome of a step while the target makes it.

Responsible for: speed over plain decoding for a given hit rate, with the cache at the verifier or at the drafter,
and how many outcomes a hit rate takes.

Deliberately does not know: which tokens an outcome ends in, queues, several sequences.

Source: SSD, arXiv 2603.03251, for the form S = (h E_hit + (1 - h) E_miss) / (h max(1, T_p) + (1 - h)
(1 + T_b)); the two places of the cache and what a late push costs are derived here.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.scheduling.theory.parameters import CycleParams
from paceline.scheduling.theory.synchronous import chain_tokens


class CachePlace(StrEnum):
    """Where paths past the outcomes wait for the step to end."""

    VERIFIER = "verifier"
    """They were pushed before it ends: a hit costs no round trip."""
    DRAFTER = "drafter"
    """They are looked up when the outcome is known: a hit costs a round trip and no drafting."""


def outcome_speedup(
    params: CycleParams,
    hit_rate: float,
    *,
    build: float = 0.0,
    place: CachePlace = CachePlace.VERIFIER,
    miss_tokens: float | None = None,
    miss_wait: float | None = None,
) -> float:
    """Speed over plain decoding when the paths past a step's outcomes are drafted during it.

    A step takes v = v(g+1). At the verifier a hit costs max(v, T_p + r), because what is pushed late keeps the
    target waiting for the rest (for T_p + r <= v that is max(v, T_p)). At the drafter it costs max(v, T_p) + r. A
    miss costs v and a draft made from nothing, c g + r.

    Args:
        params: the cycle; `draft_length` is the length of a path.
        hit_rate: `h`, chance that the step's outcome is among those drafted past. In [0, 1].
        build: `T_p`, time to draft the paths of one round, in plain steps.
        place: where the paths wait.
        miss_tokens: tokens of a round after a miss; by default as many as after a hit.
        miss_wait: `T_b`, what a miss waits for beyond its step; by default c g + r.
    """
    if not 0 <= hit_rate <= 1:
        raise ValueError(f"hit_rate must be in [0, 1], got {hit_rate!r}")
    if not build >= 0:
        raise ValueError(f"build must not be negative, got {build!r}")
    step, trip = params.step, params.round_trip
    hit_tokens = chain_tokens(params.acceptance, params.draft_length)
    if miss_tokens is None:
        miss_tokens = hit_tokens
    if miss_wait is None:
        miss_wait = params.drafting + trip
    hit_cost = max(step, build + trip) if place is CachePlace.VERIFIER else max(step, build) + trip
    tokens = hit_rate * hit_tokens + (1 - hit_rate) * miss_tokens
    return tokens / (hit_rate * hit_cost + (1 - hit_rate) * (step + miss_wait))


def best_outcome_length(
    params: CycleParams, hit_rate: float, max_length: int = 12, place: CachePlace = CachePlace.VERIFIER
) -> CycleParams:
    """The same cycle with the path length, 1 to `max_length`, that is best for a hit rate; paths are in time."""
    candidates = (dataclasses.replace(params, draft_length=length) for length in range(1, max_length + 1))
    return max(candidates, key=lambda candidate: outcome_speedup(candidate, hit_rate, place=place))


def outcome_bound(params: CycleParams) -> float:
    """What enumeration gains at most over the synchronous cycle of the same length: 1 + (c g + r) / v."""
    return 1 + (params.drafting + params.round_trip) / params.step


@dataclass(frozen=True, slots=True)
class VerificationOutcome:
    """What a step may commit.

    Attributes:
        num_accepted: drafted tokens that are accepted.
        choice: which of the drafter's choices the target's own token is, 0 for its first.
        chance: probability of this outcome.
    """

    num_accepted: int
    choice: int
    chance: float


def likeliest_outcomes(
    acceptance: Sequence[float], sibling_acceptance: float, draft_length: int, max_outcomes: int
) -> tuple[VerificationOutcome, ...]:
    """The likeliest outcomes of a step, likeliest first.

    An outcome is how many of g drafted tokens are accepted and the token of the target's that follows. m < g accepted,
    with probability path acceptance(m) (1 - a_{m+1}), are followed by the drafter's second choice there, its third,
    and so on:
    the first was rejected. All g accepted are followed by its first choice with probability a_{g+1}, or a later one. So
    most outcomes go where a rejection is likely, geometrically fewer elsewhere (the fan-out of 2603.03251).

    Args:
        acceptance: conditional acceptance per position, the first of the draft first; positions beyond repeat the last.
        sibling_acceptance: chance that a further choice is the target's token, given that all before it were not.
        draft_length: `g`, tokens of the draft being verified.
        max_outcomes: how many to list.
    """
    if not acceptance:
        return ()
    # (minus the next choice's chance, accepted, that choice, what is left after it)
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
    """Chance that a step's outcome is among the likeliest 1, 2, .. `max_outcomes`; see `likeliest_outcomes`.

    Returns:
        `max_outcomes` chances that do not fall and do not exceed 1.
    """
    if not acceptance:
        return (0.0,) * max_outcomes
    outcomes = likeliest_outcomes(acceptance, sibling_acceptance, draft_length, max_outcomes)
    return tuple(min(total, 1.0) for total in itertools.accumulate(outcome.chance for outcome in outcomes))
