"""What the theory says a cycle gains over plain decoding at a point.

Only the synchronous form stands here. `predicted` is the one place where the forms of pipelined cycles come in.
"""

from __future__ import annotations

from experiments.pipeline.cell import MAX_NODES, Cell, Cycle, Shape


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


def predicted(cycle: Cycle, cell: Cell, shape: Shape) -> float | None:
    """Speed over plain decoding; None where no form is known here."""
    if cycle is Cycle.PLAIN:
        return 1.0
    if cycle is Cycle.SYNCHRONOUS:
        return synchronous_speedup(cell, shape.draft_length)
    return None
