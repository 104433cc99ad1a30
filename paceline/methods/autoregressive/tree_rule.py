"""How a drafter's trees grow: which nodes are run at each depth, and which of the proposed nodes are sent.

Pure. Called by `paceline.methods.autoregressive.drafter`; the static tree of EAGLE-1 is in `static_rule.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.draft_layer import MAX_BEST
from paceline.methods.tree import GrowingTree

MAX_WIDTH = MAX_BEST
"""Most nodes that a dynamic tree expands at one depth."""

MIN_BRANCH = 4
"""Least number of children that every expanded node proposes. They cost no pass, and only the likeliest nodes are sent.

With 7 nodes at depth 4, 2.30 tokens a pass in place of 2.23 with two children each (20 embedded prompts).
"""


class TreeRule(Protocol):
    """A way to grow trees of a depth and a number of nodes; it never depends on which tokens were proposed."""

    def branch(self, depth: int, max_nodes: int) -> int:
        """Children that every node proposes, at most `MAX_BEST`."""

    def branch_ahead(self, depth: int, max_nodes: int) -> int:
        """Children that nodes propose once the tree is sent and paths past outcomes are drafted."""

    def width(self, depth: int, max_nodes: int) -> int | None:
        """How many of the last proposed nodes are run, if always the likeliest are; else None."""

    def expand(self, nodes: GrowingTree, proposed: Sequence[int], depth: int, max_nodes: int) -> list[int]:
        """The last proposed nodes whose children are wanted too; they are run in one pass."""

    def send(self, nodes: GrowingTree, depth: int, max_nodes: int) -> list[int]:
        """The nodes to verify, each after its parent, at most `max_nodes`; the tree marks them as sent."""


class DynamicRule:
    """EAGLE-2's rule (Li et al., 2406.16858, section 4): by the product of draft probabilities along the path.

    At each depth the likeliest `max_nodes / depth + 1` nodes are run, at least two. The likeliest `max_nodes` of all
    proposed nodes are sent.

    Args:
        min_branch: least number of children that every node proposes.
    """

    def __init__(self, min_branch: int = MIN_BRANCH) -> None:
        self._min_branch = min_branch

    def width(self, depth: int, max_nodes: int) -> int:
        """See :class:`TreeRule`."""
        return min(MAX_WIDTH, max(2, max_nodes // depth + 1))

    def branch(self, depth: int, max_nodes: int) -> int:
        """See :class:`TreeRule`."""
        return max(self.width(depth, max_nodes), self._min_branch)

    def branch_ahead(self, depth: int, max_nodes: int) -> int:
        """See :class:`TreeRule`."""
        return max(self.width(depth, max_nodes), MIN_BRANCH)

    def expand(self, nodes: GrowingTree, proposed: Sequence[int], depth: int, max_nodes: int) -> list[int]:
        """See :class:`TreeRule`."""
        return nodes.best(proposed, self.width(depth, max_nodes))

    def send(self, nodes: GrowingTree, depth: int, max_nodes: int) -> list[int]:
        """See :class:`TreeRule`."""
        return nodes.send(max_nodes)
