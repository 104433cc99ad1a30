"""A drafter that continues while the target verifies: one chain, two machines working at once.

Responsible for: the renewal form for a fixed length, and a seeded simulation of the drafter that never stops.

Deliberately does not know: several continuations at once (`outcomes`), batches, measurements.

Sources: Liu et al. (PEARL), arXiv 2408.11850, for drafting during verification and the balance point g = 1 / c;
McDanel (AMUSD), arXiv 2410.17375, for the two free-running processes. The forms are derived here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from experiments.theory.parameters import CycleParams

_LONGEST_RUN = 4096  # accepted tokens in a row; only bounds the loop that draws them


def pipelined_speedup(params: CycleParams) -> float:
    """Renewal form for a fixed length g, over plain decoding.

    S = (a^g g + sum over k < g of a^k (1 - a) (k + 1)) / (max(v, c g) + (1 - a^g) (r + c g)). Drafting is
    hidden behind verification while all tokens are accepted; a rejection costs a round trip and a new draft. A
    draft accepted as a whole brings no token of the target's own, since the drafter is past that position
    already.
    """
    length, rate = params.draft_length, params.acceptance
    if length == 0:
        return 1 / params.verify_cost(1)
    all_right = rate**length
    tokens = all_right * length + sum(rate**k * (1 - rate) * (k + 1) for k in range(length))
    # v(g), not v(g + 1): without a token of the target's own there is no row for it.
    step = params.verify_cost(length)
    return tokens / (max(step, params.drafting) + (1 - all_right) * (params.round_trip + params.drafting))


def simulate_pipelined(
    params: CycleParams,
    *,
    min_tokens: int = 0,
    has_bonus: bool = False,
    num_tokens: int = 50_000,
    seed: int = 0,
) -> float:
    """Tokens per plain step where the drafter never stops and the target verifies whatever has arrived.

    The target begins a step whenever it is free. If nothing has arrived, that is a plain step, so that the
    target is never slower than plain decoding; `draft_length` is not used. If a committed token equals the
    drafted one at its position, the draft stays valid. Another token reaches the drafter after r / 2, and the
    drafter begins again from there.

    Args:
        params: acceptance, draft cost, round trip and verification cost.
        min_tokens: the target waits until this many verifiable tokens have arrived; 0 never waits.
        has_bonus: whether a fully accepted draft also commits the target's own next token. It does in a step
            that runs the last drafted token's row; PEARL's does not.
        num_tokens: tokens to commit; the result's spread falls with their square root.
        seed: of the draws of acceptance.

    Returns:
        Speed over plain decoding.
    """
    if not params.draft_cost > 0 or min_tokens < 0 or num_tokens < 1:
        raise ValueError("draft_cost must be above 0, min_tokens not negative, num_tokens at least 1")
    random_source = random.Random(seed)
    one_way, per_token = params.round_trip / 2, params.draft_cost

    def num_right() -> int:
        count = 0
        while count < _LONGEST_RUN and random_source.random() < params.acceptance:
            count += 1
        return count

    now, committed = 0.0, 0
    begin, begun_at, wrong = (
        0,
        one_way,
        num_right(),
    )  # the draft: its first position, when, its first wrong position
    while committed < num_tokens:
        is_true = committed <= wrong
        if is_true and min_tokens:
            now = max(now, begun_at + (committed - begin + min_tokens) * per_token + one_way)
        num_drafted = max(0, math.floor((now - one_way - begun_at) / per_token + 1e-9))
        num_arrived = max(0, begin + num_drafted - committed) if is_true else 0
        num_accepted = min(num_arrived, wrong - committed) if num_arrived else 0
        is_whole = num_arrived > 0 and num_accepted == num_arrived
        now += params.verify_cost(num_arrived + 1)
        committed += num_accepted + (0 if is_whole and not has_bonus else 1)
        if is_true and committed > wrong:
            begin, begun_at = committed, now + one_way
            wrong = begin + num_right()
    return committed / now


def best_pipelined(
    params: CycleParams,
    *,
    min_tokens: Iterable[int] = (0, 1, 2, 3, 4, 6, 8),
    has_bonus: bool = False,
    num_tokens: int = 50_000,
    seed: int = 0,
) -> float:
    """`simulate_pipelined` with the best of several waits.

    Never waiting is best from r of about 0.5 on; waiting for a few tokens pays where drafting is cheap and r
    close to 0.
    """
    return max(
        simulate_pipelined(params, min_tokens=count, has_bonus=has_bonus, num_tokens=num_tokens, seed=seed)
        for count in min_tokens
    )
