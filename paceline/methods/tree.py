"""A draft tree while it grows: which nodes to run next, which to send, and which outcomes to go on from.

Responsible for EAGLE-2's rule (Li et al., 2406.16858, section 4): run the nodes with the largest product of draft
probabilities along their path, then keep the best of all that were proposed; and for the outcomes of the step that
verifies what was sent: a path of sent nodes, and one token that was not.

Deliberately does not know: models, tensors, sequences. A log-probability never rises along a path, so the best nodes
always contain their ancestors.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from paceline.trie import DraftEntry

ROOT = -1
"""Stands for the last committed token, where a node is asked for."""


class GrowingTree:
    """Nodes proposed so far, by number, in the order they were proposed.

    A node is *proposed* as a child of another, and *run* when the drafter has computed what follows it; each run node
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
        """A tree whose nodes lie as in :class:`paceline.cpu.growth.GrownTree`.

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
        """Note that nodes are run, in this order; their parents must have been.

        Returns:
            Their tokens; the row of each one's parent, `ROOT` for children of the root; their depths; and the rows
            that each sees, its own last.
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
        """How deep nodes lie; the root's children at 1."""
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
        """The likeliest `count` nodes of all, from now on the ones that are verified next."""
        return self.send_nodes(self.best(range(len(self._tokens)), count))

    def send_nodes(self, nodes: Iterable[int]) -> list[int]:
        """These nodes, each after its parent, from now on the ones that are verified next."""
        sent = list(nodes)
        self._sent = set(sent)
        return sent

    def send_child(self, parent: int, token: int) -> int:
        """One node more that is verified next: the child of a sent one, or of the root, with this token.

        Raises:
            KeyError: no such child was proposed.
        """
        for child in self._children[parent]:
            if self._tokens[child] == token:
                self._sent.add(child)
                return child
        raise KeyError(token)

    def sent_not_run(self) -> list[int]:
        """Sent nodes without proposals of what follows them, parents before children."""
        return sorted(self.not_run(self._sent))

    def not_run(self, nodes: Iterable[int]) -> list[int]:
        """Those of some nodes that have no proposals of what follows them."""
        return [node for node in nodes if node not in self._children]

    def outcomes(self, count: int, partition: int = 0, num_partitions: int = 1) -> list[int]:
        """The likeliest ends of the step that verifies what was sent: a sent path, and a token that was not sent.

        Args:
            count: at most so many, of all shares together.
            partition: every `num_partitions`-th from this one on is meant.
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
        """The likeliest proposal behind a node."""
        return min(self._children[node], key=lambda child: (-self._log_probs[child], child))

    def behind(self, outcomes: Iterable[int], count: int) -> list[int]:
        """What follows some outcomes: the likeliest such nodes, at most `count` with all that lead to them.

        An outcome that nothing follows is left out: once it is committed there would be nothing to verify.
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
        """Where a node's path leaves what was sent; `ROOT` for one that was sent."""
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
