"""What the theory says a cycle gains over plain decoding at a point.

The synchronous form and that of enumeration stand here, in the terms of the dials; a chain drafted ahead has no closed
form. `predicted` is the one place where other forms come in.
"""

from __future__ import annotations

import heapq

from experiments.pipeline.cell import HOLD_US, MAX_NODES, Cell, Cycle, Shape


def expected_tokens(acceptance: float, num_tokens: int) -> float:
    """Tokens that a step commits with a draft of so many (Leviathan et al., arXiv 2211.17192, equation 1)."""
    if acceptance >= 1:
        return num_tokens + 1.0
    return (1 - acceptance ** (num_tokens + 1)) / (1 - acceptance)


def synchronous_speedup(cell: Cell, num_tokens: int) -> float:
    """Tokens per step over the length of a round, in plain steps: verify, draft, and there and back."""
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
    """Outcome enumeration with the paths at the verifier (the form of SSD, Kumar et al., arXiv 2603.03251).

    A hit lasts a step, or as long as it takes to draft the paths and send them, where that is longer. A miss lasts a
    step, a draft and the round trip. Both commit as many tokens. It holds for drafts and paths of one length, and
    for steps that wait after a miss: of several sequences, all wait for one.
    """
    step = cell.verify_cost(shape.draft_length + 1)
    rows = cell.num_sequences * shape.outcomes
    build = cell.dials.draft_s(shape.draft_ahead, rows) * 1e3 / cell.plain_step_ms
    hit = max(step, build + cell.round_trip)
    miss = step + cell.draft_cost(shape.draft_length) + cell.round_trip
    rate = hit_rate(cell, shape) ** cell.num_sequences
    tokens = expected_tokens(cell.dials.acceptance, shape.draft_length)
    return tokens / (rate * hit + (1 - rate) * miss)


def predicted(cycle: Cycle, cell: Cell, shape: Shape) -> float | None:
    """Speed over plain decoding; None where no form is known here."""
    if cycle is Cycle.PLAIN:
        return 1.0
    if cycle is Cycle.SYNCHRONOUS:
        return synchronous_speedup(cell, shape.draft_length)
    if cycle is Cycle.ENUMERATE and shape.draft_ahead == shape.draft_length and shape.hold_us == HOLD_US:
        return enumerated_speedup(cell, shape)
    return None
