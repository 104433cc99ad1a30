"""What a tree of drafts brings in one step.

Responsible for: expected tokens of a tree, the acceptance of several children, and the best tree of a size.

Deliberately does not know: what its rows cost (`load`), how a tree is drafted.

Sources: Miao et al. (SpecInfer), arXiv 2305.09781; Chen et al. (Sequoia), arXiv 2402.12374 (best trees).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from experiments.theory.synchronous import chain_limit


def tree_tokens(path_acceptances: Iterable[float]) -> float:
    """Expected tokens of a step: 1 + the sum over nodes of the chance that their whole path is accepted."""
    return 1.0 + sum(path_acceptances)


def children_acceptance(acceptance: float, num_children: int) -> float:
    """The chance that one of k independent children is accepted: 1 - (1 - a)^k; drafters' children stay below it."""
    return float(1.0 - (1.0 - acceptance) ** num_children)


def tree_limit(acceptance: float, num_children: int) -> float:
    """Tokens per target step that no tree with k independent children a node exceeds: 1 / (1 - a_k)."""
    return chain_limit(children_acceptance(acceptance, num_children))


def best_tree_path_acceptances(child_rates: Sequence[float], num_nodes: int) -> tuple[float, ...]:
    """Path acceptances of the best tree of a size when every node has the same children.

    Path acceptance falls along a path, so the highest path acceptances are a tree, and by `tree_tokens` the best one
    of that size.

    Args:
        child_rates: chance of a node's first child, second child and so on to be the target's token, given the
            node's path. Together at most 1.
        num_nodes: size of the tree, the root not counted.

    Returns:
        The nodes' path acceptances, falling.
    """
    if any(rate < 0 for rate in child_rates) or sum(child_rates) > 1 + 1e-9:
        raise ValueError(f"child rates must be probabilities that add up to at most 1: {child_rates}")
    heap = [-rate for rate in child_rates]
    heapq.heapify(heap)
    path_acceptances: list[float] = []
    while heap and len(path_acceptances) < num_nodes:
        negative_path_acceptance = heapq.heappop(heap)
        path_acceptances.append(-negative_path_acceptance)
        for rate in child_rates:
            heapq.heappush(heap, negative_path_acceptance * rate)
    return tuple(path_acceptances)
