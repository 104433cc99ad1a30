"""How many draft nodes each sequence of one step verifies.

Responsible for: the set of nodes that maximises expected committed tokens per second of this step.

Deliberately does not know: tokens, trees, the network (a draft that has not arrived has no nodes here).

Called by: the verifier, once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def allocate_nodes(
    survivals: Sequence[Sequence[float]],
    step_time: Callable[[int], float],
    *,
    is_rejection: bool = False,
    other_rows: int = 0,
    overhead_s: float = 0.0,
) -> tuple[int, ...]:
    """Choose how many of each sequence's nodes to verify (DSpark, arXiv 2607.05147, Algorithm 1).

    Maximises (n + sum of chosen survivals) / (overhead + step_time(other_rows + n + chosen nodes)). For a
    fixed number of nodes the largest survivals are best, and as they fall along every path that set is closed
    under parents. All numbers of nodes are tried, because a measured curve has plateaus behind steps.

    In rejection mode the scan stops at the first number that does not improve: a survival further down
    depends on the tokens above it, and looking at it to decide on those would bias what is committed.

    Args:
        survivals: per sequence, its nodes' survivals, falling (as `DraftTrie.select` returns them).
        step_time: seconds of a step over that many rows.
        is_rejection: whether a sequence of the step is in rejection mode.
        other_rows: rows in the step besides, such as prefill chunks.
        overhead_s: time per step that does not depend on rows.

    Returns:
        For each sequence how many of its first nodes to verify.
    """
    num_sequences = len(survivals)
    if not num_sequences:
        return ()
    ranked = sorted(
        ((survival, -index) for index, values in enumerate(survivals) for survival in values), reverse=True
    )
    base_rows = other_rows + num_sequences
    expected = float(num_sequences)
    best_count, best_rate = 0, expected / (overhead_s + step_time(base_rows))
    for count, (survival, _) in enumerate(ranked, start=1):
        expected += survival
        rate = expected / (overhead_s + step_time(base_rows + count))
        if rate > best_rate:
            best_count, best_rate = count, rate
        elif is_rejection:
            break
    counts = [0] * num_sequences
    for _, negative_index in ranked[:best_count]:
        counts[-negative_index] += 1
    return tuple(counts)
