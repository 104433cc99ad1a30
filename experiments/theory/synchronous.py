"""Draft, verify, draft, verify: what a chain brings when the two alternate.

Responsible for: tokens per round, speed over plain decoding, the best length in closed form, break-even points,
and the bounds of every chain.

Deliberately does not know: overlap of drafting and verification (`pipelined`, `outcomes`), trees, load.

Sources: Leviathan et al., arXiv 2211.17192 (tokens per round, gain iff a > c); Timor et al., arXiv 2405.14105
(bound with replicas). The best length solves dS/dg = 0 with a flat verification cost; it is derived here and
checked numerically.
"""

from __future__ import annotations

import dataclasses
import math

from experiments.theory.parameters import CycleParams

_NEWTON_STEPS = 64


def chain_tokens(acceptance: float, draft_length: int) -> float:
    """Expected tokens of a round, the target's own included: E(g) = (1 - a^(g+1)) / (1 - a) (2211.17192, eq. 1)."""
    if acceptance == 1:
        return draft_length + 1.0
    return (1 - acceptance ** (draft_length + 1)) / (1 - acceptance)


def chain_limit(acceptance: float) -> float:
    """Tokens per target step that no chain exceeds, however long and however well it is hidden: 1 / (1 - a)."""
    return math.inf if acceptance == 1 else 1 / (1 - acceptance)


def synchronous_speedup(params: CycleParams) -> float:
    """S(g) = E(g) / (v(g+1) + c g + r), over plain decoding; 1 for g = 0, where nothing is drafted and nobody waits."""
    if params.draft_length == 0:
        return 1 / params.verify_cost(1)
    tokens = chain_tokens(params.acceptance, params.draft_length)
    return tokens / (params.step + params.drafting + params.round_trip)


def best_synchronous_length(acceptance: float, draft_cost: float, round_trip: float = 0.0) -> float:
    """The real-valued length that maximises S with a flat verification cost.

    g* = (-W - 1) / L - (1 + r) / c with L = -ln a and W = W_-1(-exp(-(1 + L ((1 + r) / c - 1)))), Lambert's lower
    branch.

    Returns:
        g*, not below 0. Infinite where drafting is free.
    """
    params = CycleParams(acceptance, draft_cost, round_trip)
    if params.acceptance == 0:
        return 0.0
    if draft_cost == 0:
        return math.inf
    decay = -math.log(acceptance)
    waiting = (1 + round_trip) / draft_cost
    # The exponential underflows long before it matters, so its logarithm goes in.
    lambert = _lower_lambert(1 + decay * (waiting - 1))
    return max(0.0, (-lambert - 1) / decay - waiting)


def best_synchronous(params: CycleParams, max_length: int = 64) -> CycleParams:
    """The same cycle with the whole length, 0 included, that is best under its own verification cost."""
    candidates = (dataclasses.replace(params, draft_length=length) for length in range(max_length + 1))
    return max(candidates, key=synchronous_speedup)


def break_even_round_trip(params: CycleParams, max_length: int = 64) -> float:
    """The largest r with which some length is at least as fast as plain decoding: max over g of E(g) - v(g+1) - c g.

    Drafts that cost nothing come to a / (1 - a). Negative where speculation loses even without a network.
    """
    return max(
        chain_tokens(params.acceptance, length) - params.verify_cost(length + 1) - params.draft_cost * length
        for length in range(1, max_length + 1)
    )


def break_even_acceptance(params: CycleParams, max_length: int = 64) -> float:
    """The least acceptance with which some length is at least as fast as plain decoding, to 1e-9.

    With r = 0 and a flat verification cost that is c. 1 where no acceptance is enough.
    """
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        pays = break_even_round_trip(dataclasses.replace(params, acceptance=middle), max_length)
        low, high = (low, middle) if pays >= params.round_trip else (middle, high)
    return high


def break_even_remote_round_trip(draft_length: int, colocated_cost: float, remote_cost: float) -> float:
    """Below this r, drafting elsewhere is faster than drafting beside the target, both synchronous: g (c_colocated
    - c_remote).

    The cost of drafting beside the target includes contention, and parallelism that a small model cannot use.
    """
    return draft_length * (colocated_cost - remote_cost)


def replica_bound(params: CycleParams) -> float:
    """Speed over plain decoding with as many target replicas as it takes: 1 / (a c + 1 - a) (2405.14105)."""
    return 1 / (params.acceptance * params.draft_cost + 1 - params.acceptance)


def replicas_needed(draft_cost: float, lookahead: int) -> int:
    """Target replicas at which verification keeps up: ceil(1 / (lookahead c)) (2405.14105)."""
    if not draft_cost > 0 or lookahead < 1:
        raise ValueError("draft_cost must be above 0 and lookahead at least 1")
    return math.ceil(1 / (lookahead * draft_cost))


def _lower_lambert(log_argument: float) -> float:
    """W_-1(-exp(-x)) for x >= 1, as the solution of u - ln u = x with u = -W >= 1, by Newton's method."""
    if log_argument <= 1:
        return -1.0
    # Above the root, from where Newton's method on this convex function comes down without overshooting.
    u = log_argument + math.log(log_argument) + 1.0
    for _ in range(_NEWTON_STEPS):
        step = (u - math.log(u) - log_argument) / (1 - 1 / u)
        u -= step
        if abs(step) <= 1e-14 * u:
            break
    return -u
