"""Drafting past every likely outcome of a step while the target makes it.

Responsible for: speed over plain decoding for a given hit rate, with the speculation cache at the verifier or
at the drafter.

Deliberately does not know: how likely outcomes are (`paceline.scheduling.outcomes`), queues, several sequences.

Source: SSD, arXiv 2603.03251, for the form S = (h E_hit + (1 - h) E_miss) / (h max(1, T_p) + (1 - h) (1 +
T_b)). The two placements of the cache and the cost of a late push are derived here.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from experiments.theory.parameters import CycleParams
from experiments.theory.synchronous import chain_tokens


class CachePlace(StrEnum):
    """Where paths past the outcomes are stored until the step ends."""

    VERIFIER = "verifier"
    """They are pushed before the step ends: a hit costs no round trip."""
    DRAFTER = "drafter"
    """They are read when the outcome is known: a hit costs a round trip and no drafting."""


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

    A step takes v = v(g+1). With the cache at the verifier a hit costs max(v, T_p + r): the target waits for
    the rest of paths that are pushed late (for T_p + r <= v that is max(v, T_p)). With the cache at the drafter
    it costs max(v, T_p) + r. A miss costs v and a draft made from the committed text, c g + r.

    Args:
        params: the cycle; `draft_length` is the length of a path.
        hit_rate: `h`, chance that the step's outcome is among those drafted past. In [0, 1].
        build: `T_p`, time to draft the paths of one round, in plain steps.
        place: where the paths are stored.
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
    """The same cycle with the best path length, 1 to `max_length`, for a hit rate; paths arrive in time."""
    candidates = (dataclasses.replace(params, draft_length=length) for length in range(1, max_length + 1))
    return max(candidates, key=lambda candidate: outcome_speedup(candidate, hit_rate, place=place))


def outcome_bound(params: CycleParams) -> float:
    """The most that outcomes gain over the synchronous cycle of the same length: 1 + (c g + r) / v."""
    return 1 + (params.drafting + params.round_trip) / params.step
