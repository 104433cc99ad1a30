"""Draft trees whose shape is fixed before a token is known: EAGLE-1's tree, and the best one for measured accuracies.

A node is named by its path of ranks: `(0, 2)` is the third likeliest token behind the likeliest one. This file grows a
tree into such a shape; `static_tree.py` finds the best one. Pure; called by `paceline.methods.eagle1.drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from paceline.draft_layer import MAX_BEST
from paceline.methods.autoregressive.tree_rule import MIN_BRANCH
from paceline.methods.static_tree import StaticTree, search_tree
from paceline.methods.tree import GrowingTree

Path = tuple[int, ...]

_REFERENCE_CHILDREN: dict[Path, int] = {
    (): 4,
    (0,): 3, (1,): 2, (2,): 2, (3,): 1,
    (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}  # fmt: skip


def reference_paths(depth: int = 5, max_nodes: int = 25) -> tuple[Path, ...]:
    """The tree of the reference implementation: 25 nodes, of which 4, 8, 8, 3 and 2 at depths 1 to 5.

    A smaller tree keeps the nodes with the smallest sum of depth and ranks. That is the order of their value if every
    rank and every depth halves the chance of the one before. Parents come before their children.
    """
    paths = ((*parent, rank) for parent, count in _REFERENCE_CHILDREN.items() for rank in range(count))
    ranked = sorted(paths, key=lambda path: (len(path) + sum(path), len(path), path))
    return tuple(path for path in ranked if len(path) <= depth)[:max_nodes]


def paths_of(tree: StaticTree) -> tuple[Path, ...]:
    """A searched tree's nodes as paths of ranks, parents first."""
    paths: list[Path] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return tuple(paths)


def expected_tokens(paths: Sequence[Path], accuracies: Sequence[Sequence[float]]) -> float:
    """Tokens that a step commits on average with such a tree, the target's own included.

    Args:
        paths: the tree's nodes.
        accuracies: by depth and rank, how often the target chooses that token where it chose the path before it.
    """
    return 1.0 + sum(prod(accuracies[depth][rank] for depth, rank in enumerate(path)) for path in paths)


class StaticRule:
    """Grows trees into a static shape; see :class:`paceline.methods.autoregressive.tree_rule.TreeRule`.

    Args:
        accuracies: as in :func:`expected_tokens`; the shape is the best one for them. Depths past their last row use
            that row. None takes a part of the reference tree.
    """

    def __init__(self, accuracies: Sequence[Sequence[float]] | None = None) -> None:
        self._accuracies = accuracies
        self._shapes: dict[tuple[int, int], tuple[Path, ...]] = {}

    def paths(self, depth: int, max_nodes: int) -> tuple[Path, ...]:
        """The shape of drafts of this size, parents first."""
        size = (depth, max_nodes)
        if size not in self._shapes:
            if self._accuracies is None:
                self._shapes[size] = reference_paths(depth, max_nodes)
            else:
                deeper = [self._accuracies[-1]] * (depth - len(self._accuracies))
                self._shapes[size] = paths_of(search_tree([*self._accuracies, *deeper], max_nodes, depth))
        return self._shapes[size]

    def width(self, depth: int, max_nodes: int) -> None:
        """None: the shape determines which nodes are run."""

    def branch(self, depth: int, max_nodes: int) -> int:
        """As many as the shape uses, and some more for the outcomes beside it."""
        return min(MAX_BEST, max(MIN_BRANCH, *(path[-1] + 1 for path in self.paths(depth, max_nodes))))

    def branch_ahead(self, depth: int, max_nodes: int) -> int:
        """The same as while the tree grows."""
        return self.branch(depth, max_nodes)

    def expand(self, nodes: GrowingTree, proposed: Sequence[int], depth: int, max_nodes: int) -> list[int]:
        """The nodes that have children in the shape."""
        inner = {path[:-1] for path in self.paths(depth, max_nodes)}
        return [node for node in proposed if nodes.ranks(node) in inner]

    def send(self, nodes: GrowingTree, depth: int, max_nodes: int) -> list[int]:
        """The shape's nodes that have a token: filters may leave fewer tokens than ranks."""
        found = (nodes.at(path) for path in self.paths(depth, max_nodes))
        return nodes.send_nodes(node for node in found if node is not None)
