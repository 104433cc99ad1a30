"""What the theory says a cycle gains over plain decoding at a point.

Responsible for: putting dials and lengths in the theory's terms (`experiments.theory`). Of a batch, a held step
waits for all its sequences.
"""

from __future__ import annotations

import heapq

from experiments.pipeline.cell import MAX_NODES, WAIT_BUDGET_US, Cell, Cycle, Shape
from experiments.theory import CycleParams, chain_tokens, outcome_speedup, simulate_pipelined


def expected_tokens(acceptance: float, num_tokens: int) -> float:
    """Tokens that a step commits with a draft of so many."""
    return num_tokens + 1.0 if acceptance >= 1 else chain_tokens(acceptance, num_tokens)


def synchronous_speedup(cell: Cell, num_tokens: int) -> float:
    """Tokens per step over the length of a round: verify, draft, and there and back; a draft may have a fixed cost."""
    round_length = cell.verify_cost(num_tokens + 1) + cell.draft_cost(num_tokens) + cell.round_trip
    return expected_tokens(cell.dials.acceptance, num_tokens) / round_length


def best_synchronous_length(cell: Cell) -> int:
    """The draft length at which the synchronous form is highest."""
    return max(range(1, MAX_NODES), key=lambda num_tokens: synchronous_speedup(cell, num_tokens))


def hit_rate(cell: Cell, shape: Shape) -> float:
    """Chance that the outcome of a step is among those drafted past: the likeliest, as many as fit in a frame.

    The first error stands at some place of the draft, or behind its end; there comes the drafter's own token (behind
    the end alone) or one of the alternatives, each as likely as another.
    """
    dials = cell.dials
    alternative = dials.bonus_hit_rate / dials.num_alternatives
    chances: list[float] = []
    for place in range(shape.draft_length + 1):
        reached = dials.acceptance**place
        chances += [reached * (1 - dials.acceptance) * alternative] * dials.num_alternatives
    chances.append(dials.acceptance ** (shape.draft_length + 1))
    fits = (MAX_NODES - shape.draft_length) // (1 + shape.draft_ahead)
    return sum(heapq.nlargest(min(shape.outcomes, fits), chances))


def enumerated_speedup(cell: Cell, shape: Shape) -> float:
    """Outcome enumeration with the paths at the verifier, drafts and paths alike, steps that wait after a miss."""
    rows = cell.num_sequences * shape.outcomes
    return outcome_speedup(
        _params(cell, shape.draft_length),
        hit_rate(cell, shape) ** cell.num_sequences,
        build=cell.dials.draft_s(shape.draft_ahead, rows) * 1e3 / cell.plain_step_ms,
        miss_wait=cell.draft_cost(shape.draft_length) + cell.round_trip,
    )


def predicted(cycle: Cycle, cell: Cell, shape: Shape) -> float | None:
    """Speed over plain decoding; None where no form is known."""
    if cycle is Cycle.PLAIN:
        return 1.0
    if cycle is Cycle.SYNCHRONOUS:
        return synchronous_speedup(cell, shape.draft_length)
    if cycle is Cycle.AHEAD and cell.num_sequences == 1 and cell.cost > 0 and cell.dials.acceptance < 1:
        return simulate_pipelined(_params(cell, shape.draft_length), has_bonus=True)
    if (
        cycle is Cycle.ENUMERATE
        and shape.draft_ahead == shape.draft_length
        and shape.wait_budget_us == WAIT_BUDGET_US
    ):
        return enumerated_speedup(cell, shape)
    return None


def _params(cell: Cell, draft_length: int) -> CycleParams:
    acceptance = min(cell.dials.acceptance, 1 - 1e-9)
    return CycleParams(acceptance, cell.cost, cell.round_trip, draft_length, cell.verify_cost)
