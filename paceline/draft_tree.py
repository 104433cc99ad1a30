"""Draft trees: what the verifier runs in one step.

The trie selects them, the verifier and `paceline.sampling` walk them. Tensors and the wire are not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.drafts import DraftClaim, SiblingDraws


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The draft nodes that one step verifies, best path acceptance first and parents before children.

    Attributes:
        tokens: token ids; node i is row i + 1 of the sequence's step, the root is row 0.
        parents: index of the parent node, -1 for children of the root.
        depths: 1 for a child of the root; the node proposes position ``committed_length + depth - 1``.
        path_acceptances: product of confidences from the root down to the node.
        draft_dists: the draw of each node's token, None where it was not drawn. Drawn siblings are listed in the order
            of their draws; a repeated token has a node of its own.
        claims: what the drafter said about each node, None where it said nothing; empty where no calibrator may learn
            from the tree.
        drafter_path_acceptances: path acceptances from the drafter's confidences alone, 0 for nodes that the drafter
            did not propose; empty where the drafter proposed all nodes.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    path_acceptances: tuple[float, ...] = ()
    draft_dists: tuple[SiblingDraws | None, ...] = ()
    claims: tuple[DraftClaim | None, ...] = ()
    drafter_path_acceptances: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, num_nodes: int) -> DraftTree:
        """The first ``num_nodes`` nodes, which are themselves the best tree of that size."""
        if num_nodes >= len(self.tokens):
            return self
        cut = max(num_nodes, 0)
        return DraftTree(
            self.tokens[:cut],
            self.parents[:cut],
            self.depths[:cut],
            self.path_acceptances[:cut],
            self.draft_dists[:cut],
            self.claims[:cut],
            self.drafter_path_acceptances[:cut],
        )

    def only(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of some of the nodes: their indices ascend, and each node's parent is among them."""
        if len(nodes) == len(self.tokens):
            return self
        new_index = {node: index for index, node in enumerate(nodes)}
        return DraftTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(-1 if self.parents[node] < 0 else new_index[self.parents[node]] for node in nodes),
            tuple(self.depths[node] for node in nodes),
            tuple(self.path_acceptances[node] for node in nodes),
            tuple(self.draft_dists[node] for node in nodes),
            tuple(self.claims[node] for node in nodes) if self.claims else (),
            tuple(self.drafter_path_acceptances[node] for node in nodes)
            if self.drafter_path_acceptances
            else (),
        )

    def is_drafted(self, node: int) -> bool:
        """Whether a drafter proposed the node."""
        return not self.drafter_path_acceptances or self.drafter_path_acceptances[node] > 0

    @property
    def num_ngram_nodes(self) -> int:
        """Nodes that come from an n-gram proposal alone."""
        return self.drafter_path_acceptances.count(0.0)

    @property
    def drafted_depth(self) -> int:
        """Depth of the deepest node that a drafter proposed."""
        return max((depth for node, depth in enumerate(self.depths) if self.is_drafted(node)), default=0)


EMPTY_TREE = DraftTree()
