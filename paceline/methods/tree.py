"""A draft tree while it grows: which nodes to run next, which to send, and which verification outcomes are likely.

EAGLE-2's rule (Li et al., 2406.16858, section 4) runs the nodes with the largest product of draft probabilities along
their path, then keeps the best of all proposed nodes. A log-probability never rises along a path, so the best nodes
always contain their ancestors. A verification outcome is a path of sent nodes and one token that was not sent.

Contains no model, tensor or sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from paceline.drafts import DraftEntry

ROOT = -1
"""Number of the last committed token, in place of a node's."""


class GrowingTree:
    """Nodes by number, in the order in which they were proposed.

    A node is *proposed* as a child of another. It is *run* when the drafter has computed what follows it. Each run node
    has a row, counted from the first that was run.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._log_probs: list[float] = []
        self._scores: list[float] = []  # sum of log-probabilities along the path
        self._children: dict[int, range] = {}  # of nodes whose children have been proposed
        self._paths: dict[int, list[int]] = {ROOT: []}  # of run nodes: rows of their ancestors and their own
        self._sent: set[int] = set()

    @classmethod
    def grown(
        cls, tokens: Sequence[int], log_probs: Sequence[float], rows: Iterable[int], branch: int
    ) -> GrowingTree:
        """A tree with nodes in the order of :class:`paceline.cpu.growth.GrownTree`.

        Args:
            tokens: target id of each node.
            log_probs: natural log-probability of each node given its path.
            rows: the node that each row ran.
            branch: children of the root and of each row.
        """
        tree = cls()
        for first, parent in zip(range(0, len(tokens), branch), (ROOT, *rows), strict=True):
            if parent != ROOT:
                tree.run([parent])
            tree.propose([parent], [log_probs[first : first + branch]], [tokens[first : first + branch]])
        return tree

    def propose(
        self, parents: Iterable[int], log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]
    ) -> list[int]:
        """Add the children of some nodes.

        Args:
            parents: nodes, or `ROOT`.
            log_probs: natural log-probabilities of each one's children given their path.
            tokens: the children's target ids.

        Returns:
            The children, all parents' together.
        """
        first = len(self._tokens)
        for parent, child_log_probs, child_tokens in zip(parents, log_probs, tokens, strict=True):
            base, depth = (0.0, 1) if parent == ROOT else (self._scores[parent], self._depths[parent] + 1)
            begin = len(self._tokens)
            for log_prob, token in zip(child_log_probs, child_tokens, strict=True):
                self._tokens.append(token)
                self._parents.append(parent)
                self._depths.append(depth)
                self._log_probs.append(log_prob)
                self._scores.append(base + log_prob)
            self._children[parent] = range(begin, len(self._tokens))
        return list(range(first, len(self._tokens)))

    def run(self, nodes: Sequence[int]) -> tuple[list[int], list[int], list[int], list[list[int]]]:
        """Record that nodes are run, in this order; their parents must have been run before.

        Returns:
            Their tokens; the row of each one's parent, `ROOT` for children of the root; their depths; and the rows
            that each attends to, its own last.
        """
        first = len(self._paths) - 1
        for row, node in enumerate(nodes, start=first):
            self._paths[node] = [*self._paths[self._parents[node]], row]
        paths = [self._paths[node] for node in nodes]
        from_rows = [path[-2] if len(path) > 1 else ROOT for path in paths]
        return [self._tokens[n] for n in nodes], from_rows, [self._depths[n] for n in nodes], paths

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self._depths, default=0)

    def depths(self, nodes: Iterable[int]) -> list[int]:
        """Depths of nodes; the root's children have depth 1."""
        return [self._depths[node] for node in nodes]

    def ranks(self, node: int) -> tuple[int, ...]:
        """The path to a node as places among the proposals of each parent, the root's first."""
        path: list[int] = []
        while node != ROOT:
            parent = self._parents[node]
            path.append(node - self._children[parent].start)
            node = parent
        return tuple(reversed(path))

    def at(self, ranks: Iterable[int]) -> int | None:
        """The node at the end of such a path; None where it was not proposed."""
        node = ROOT
        for rank in ranks:
            children = self._children.get(node, range(0))
            if rank >= len(children):
                return None
            node = children[rank]
        return node

    def best(self, nodes: Iterable[int], count: int) -> list[int]:
        """The likeliest of some nodes, at most `count`, likeliest first; of equals the older."""
        return heapq.nsmallest(count, nodes, key=lambda node: (-self._scores[node], node))

    def send(self, count: int) -> list[int]:
        """Mark the likeliest `count` nodes of all as sent, and return them."""
        return self.send_nodes(self.best(range(len(self._tokens)), count))

    def send_nodes(self, nodes: Iterable[int]) -> list[int]:
        """Mark these nodes as sent, and return them, each after its parent."""
        sent = list(nodes)
        self._sent = set(sent)
        return sent

    def send_child(self, parent: int, token: int) -> int:
        """Mark one more node as sent: the child with this token of a sent node, or of the root.

        Raises:
            KeyError: no such child was proposed.
        """
        for child in self._children[parent]:
            if self._tokens[child] == token:
                self._sent.add(child)
                return child
        raise KeyError(token)

    def sent_not_run(self) -> list[int]:
        """Sent nodes that have not been run, parents before children."""
        return sorted(self.not_run(self._sent))

    def not_run(self, nodes: Iterable[int]) -> list[int]:
        """Those of some nodes that have not been run."""
        return [node for node in nodes if node not in self._children]

    def outcomes(self, count: int, partition: int = 0, num_partitions: int = 1) -> list[int]:
        """The likeliest verification outcomes: the nodes that are a sent path and then a token that was not sent.

        Args:
            count: most outcomes of all partitions together.
            partition: this drafter takes every `num_partitions`-th outcome, beginning with this one.
            num_partitions: drafters that work on the same sent nodes.
        """
        ends = (
            child
            for parent, children in self._children.items()
            if parent == ROOT or parent in self._sent
            for child in children
            if child not in self._sent
        )
        return self.best(ends, count)[partition::num_partitions]

    def best_child(self, node: int) -> int:
        """The likeliest child of a node."""
        return min(self._children[node], key=lambda child: (-self._log_probs[child], child))

    def behind(self, outcomes: Iterable[int], count: int) -> list[int]:
        """The likeliest nodes past some outcomes, at most `count` with all that lead to them.

        An outcome without children is left out: once it is committed there would be nothing to verify.
        """
        ends, kept = set(outcomes), set[int]()
        followers = (n for n in range(len(self._tokens)) if n not in ends and self._outcome_of(n) in ends)
        for node in self.best(followers, count):
            path = []
            while node != ROOT and node not in kept:
                path.append(node)
                node = self._parents[node]
            if len(kept) + len(path) > count:
                break
            kept.update(path)
        return sorted(kept)

    def _outcome_of(self, node: int) -> int:
        """The first node of a node's path that was not sent; `ROOT` for a node that was sent."""
        outcome = ROOT
        while node != ROOT and node not in self._sent:
            outcome, node = node, self._parents[node]
        return outcome

    def entry(self, start: int, nodes: Sequence[int]) -> DraftEntry:
        """Nodes, each after its parent, as a draft entry from committed length `start`."""
        place = {node: index for index, node in enumerate(nodes)}
        return DraftEntry(
            start=start,
            tokens=tuple(self._tokens[node] for node in nodes),
            parents=tuple(place[p] if (p := self._parents[node]) != ROOT else -1 for node in nodes),
            log_probs=tuple(min(0.0, self._log_probs[node]) for node in nodes),
        )
