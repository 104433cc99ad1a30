"""Draft trees whose shape is fixed before a token is known: EAGLE-1's tree, and the best one for measured accuracies.

A node is named by its path of ranks: `(0, 2)` is the third likeliest token behind the likeliest one. Responsible for
such shapes and for growing a tree into one. Pure; called by `paceline.drafters.eagle1`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from paceline.drafters.draft_layer import MAX_BEST
from paceline.drafters.tree import GrowingTree
from paceline.drafters.tree_rule import MIN_BRANCH

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A shape.

    Attributes:
        paths: of its nodes, each after its parent; the ones worth most come first, so that a smaller tree is a prefix.
    """

    paths: tuple[Path, ...]

    def cut(self, depth: int, max_nodes: int) -> StaticTree:
        """The first `max_nodes` nodes that lie no deeper than `depth`."""
        return StaticTree(tuple(path for path in self.paths if len(path) <= depth)[:max_nodes])

    @property
    def per_depth(self) -> list[int]:
        """Nodes at each depth, the root's children first."""
        depths = [len(path) for path in self.paths]
        return [depths.count(depth) for depth in range(1, max(depths, default=0) + 1)]

    def expected_tokens(self, accuracies: Sequence[Sequence[float]]) -> float:
        """Tokens that a step commits on average, the target's own included; see :func:`search_tree`."""
        return 1.0 + sum(prod(accuracies[d][rank] for d, rank in enumerate(path)) for path in self.paths)


def reference_tree() -> StaticTree:
    """The tree of the reference implementation: 25 nodes, of which 4, 8, 8, 3 and 2 at depths 1 to 5.

    Cut smaller, it keeps the nodes with the smallest sum of depth and ranks, which is the order of their value where
    every rank halves the chance of the one before.
    """
    children = {
        (): 4,
        (0,): 3, (1,): 2, (2,): 2, (3,): 1,
        (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1,
        (0, 0, 0): 3,
        (0, 0, 0, 0): 2,
    }  # fmt: skip
    paths = ((*parent, rank) for parent, count in children.items() for rank in range(count))
    return StaticTree(tuple(sorted(paths, key=lambda path: (len(path) + sum(path), len(path), path))))


def search_tree(accuracies: Sequence[Sequence[float]], depth: int, max_nodes: int) -> StaticTree:
    """The shape of so many nodes that commits most tokens a step.

    A node's value is the chance that the target takes its path, the product of the accuracies along it; so values fall
    along a path, and taking the best child of what was taken gives the best tree (Cai et al., 2401.10774, section 2.3;
    Chen et al., 2402.12374, section 4).

    Args:
        accuracies: by depth and rank, how often the target chooses that token where it chose the path before it.
        depth: of the deepest node, at most.
        max_nodes: nodes.
    """
    paths: list[Path] = []
    behind: list[tuple[float, Path]] = [(-1.0, ())]
    while behind and len(paths) <= max_nodes:
        value, path = heapq.heappop(behind)
        paths.append(path)
        if len(path) < min(depth, len(accuracies)):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if accuracy > 0.0:
                    heapq.heappush(behind, (value * accuracy, (*path, rank)))
    return StaticTree(tuple(paths[1:]))  # without the root


class StaticRule:
    """Grows trees into a static shape; see :class:`paceline.drafters.tree_rule.TreeRule`.

    Args:
        accuracies: measured, for the best shape of the size that is asked for; None cuts the reference tree.
    """

    def __init__(self, accuracies: Sequence[Sequence[float]] | None = None) -> None:
        self._accuracies = accuracies
        self._trees: dict[tuple[int, int], StaticTree] = {}

    def tree(self, depth: int, max_nodes: int) -> StaticTree:
        """The shape for drafts of this size."""
        size = (depth, max_nodes)
        if size not in self._trees:
            self._trees[size] = (
                reference_tree().cut(depth, max_nodes)
                if self._accuracies is None
                else search_tree(self._accuracies, depth, max_nodes)
            )
        return self._trees[size]

    def branch(self, depth: int, max_nodes: int) -> int:
        """As many as the shape uses; some more, so that outcomes beside it are known."""
        ranks = [path[-1] + 1 for path in self.tree(depth, max_nodes).paths]
        return min(MAX_BEST, max(MIN_BRANCH, *ranks))

    def expand(self, nodes: GrowingTree, proposed: Sequence[int], depth: int, max_nodes: int) -> list[int]:
        """Those with children in the shape."""
        inner = {path[:-1] for path in self.tree(depth, max_nodes).paths}
        return [node for node in proposed if nodes.ranks(node) in inner]

    def send(self, nodes: GrowingTree, depth: int, max_nodes: int) -> list[int]:
        """The shape's nodes, as far as tokens were proposed for them: filters may leave fewer."""
        found = (nodes.at(path) for path in self.tree(depth, max_nodes).paths)
        return nodes.send_nodes(node for node in found if node is not None)
