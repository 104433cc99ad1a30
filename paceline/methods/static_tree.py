"""Medusa's static tree: which ranks of which heads get a node, for every text.

The greedy search of 2401.10774 ("Searching for the optimized tree construction"): a node is a path of ranks, and its
value is the product of the accuracies along the path. The tree grows by the best node whose parent is in the tree,
until it has the wanted number of nodes. Contains no token and no model.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_FIRST = 0.4
PRIOR_BY_HEAD = 0.75
PRIOR_BY_RANK = 0.55


def prior_accuracies(num_heads: int, num_ranks: int) -> tuple[tuple[float, ...], ...]:
    """Accuracies by head and rank for a checkpoint without measured ones; they fall in both.

    The next head is right three quarters as often, the next rank about half as often. The tree of 63 nodes
    that this gives has 9, 28, 21 and 5 by depth; the one that the authors measured for a 7B model has 10, 28, 23 and 2.
    """
    return tuple(
        tuple(PRIOR_FIRST * PRIOR_BY_HEAD**head * PRIOR_BY_RANK**rank for rank in range(num_ranks))
        for head in range(num_heads)
    )


@dataclass(frozen=True, slots=True)
class StaticTree:
    """Nodes in the order in which they were added, parents first.

    Attributes:
        parents: index of each node's parent, -1 for the root's children.
        heads: head whose token each node is: its depth, from 0.
        ranks: which of that head's tokens, the likeliest being 0.
    """

    parents: tuple[int, ...]
    heads: tuple[int, ...]
    ranks: tuple[int, ...]


def search_tree(accuracies: Sequence[Sequence[float]], max_nodes: int, max_depth: int) -> StaticTree:
    """The best tree within a number of nodes and a depth.

    Args:
        accuracies: by head and rank, P(the head's token of this rank is the next token).
        max_nodes: nodes without the root.
        max_depth: length of the longest path, at most the number of heads.
    """
    depth = min(max_depth, len(accuracies))
    parents: list[int] = []
    heads: list[int] = []
    ranks: list[int] = []
    # (-value, order, parent, head, rank): of equal values the node that was reachable first comes first.
    reachable: list[tuple[float, int, int, int, int]] = []
    order = 0

    def reach(parent: int, value: float, head: int) -> None:
        nonlocal order
        for rank, accuracy in enumerate(accuracies[head]):
            heapq.heappush(reachable, (-value * accuracy, order, parent, head, rank))
            order += 1

    if depth > 0:
        reach(-1, 1.0, 0)
    while reachable and len(parents) < max_nodes:
        value, _, parent, head, rank = heapq.heappop(reachable)
        parents.append(parent)
        heads.append(head)
        ranks.append(rank)
        if head + 1 < depth:
            reach(len(parents) - 1, -value, head + 1)
    return StaticTree(tuple(parents), tuple(heads), tuple(ranks))
