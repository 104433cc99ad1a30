"""A draft tree while it grows: which nodes to expand next, and which to keep in the end.

EAGLE-2's rule (Li et al., 2406.16858, section 4): expand the nodes with the largest product of draft probabilities
along their path, then keep the best of all that were proposed. Pure; knows nothing of models. A log-probability never
rises along a path, so the best nodes always contain their ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.trie import DraftEntry


class GrowingTree:
    """Nodes proposed so far, depth by depth.

    Args:
        width: nodes expanded at each depth.
        max_nodes: nodes kept in the end.
    """

    def __init__(self, width: int, max_nodes: int) -> None:
        self._width = width
        self._max_nodes = max_nodes
        self._tokens: list[int] = []
        self._parents: list[int] = []  # index of the parent node, -1 for a child of the root
        self._log_probs: list[float] = []
        self._scores: list[float] = []  # sum of log-probabilities along the path
        self._expanded: list[int] = []  # nodes of the latest rows, in their order; empty means the root
        self._next: list[int] = []
        self._num_rows = 0
        self._path_of: dict[int, list[int]] = {}  # rows of a node that was run: its ancestors' and its own

    def expand(self, log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> None:
        """Add the children of the latest rows.

        Args:
            log_probs: of each child given its path, for each row.
            tokens: the children's tokens, for each row.
        """
        first = len(self._tokens)
        for row, (child_log_probs, child_tokens) in enumerate(zip(log_probs, tokens, strict=True)):
            parent = self._expanded[row] if self._expanded else -1
            base = self._scores[parent] if parent >= 0 else 0.0
            for log_prob, token in zip(child_log_probs, child_tokens, strict=True):
                self._tokens.append(token)
                self._parents.append(parent)
                self._log_probs.append(log_prob)
                self._scores.append(base + log_prob)
        added = sorted(range(first, len(self._tokens)), key=lambda node: -self._scores[node])
        self._next = added[: self._width]

    def frontier(self) -> tuple[list[int], list[int], list[list[int]]]:
        """The nodes to run next.

        Returns:
            Their tokens; the latest rows they continue from; and the path of each, as rows counted from the first that
            was ever run, its own last.
        """
        from_rows, paths = [], []
        for row, node in enumerate(self._next):
            parent = self._parents[node]
            from_rows.append(self._expanded.index(parent) if parent >= 0 else 0)
            paths.append([*self._path_of.get(parent, ()), self._num_rows + row])
            self._path_of[node] = paths[-1]
        self._num_rows += len(self._next)
        self._expanded = self._next
        return [self._tokens[node] for node in self._next], from_rows, paths

    def entry(self, start: int) -> DraftEntry:
        """The likeliest nodes as a draft entry from committed length `start`."""
        ranked = sorted(range(len(self._tokens)), key=lambda node: (-self._scores[node], node))
        kept = ranked[: self._max_nodes]
        place = {node: index for index, node in enumerate(kept)}
        return DraftEntry(
            start=start,
            tokens=tuple(self._tokens[node] for node in kept),
            parents=tuple(place[p] if (p := self._parents[node]) >= 0 else -1 for node in kept),
            log_probs=tuple(min(0.0, self._log_probs[node]) for node in kept),
        )
