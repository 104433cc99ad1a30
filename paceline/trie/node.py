"""One node of the draft trie: a proposed token and its confidence.

Responsible for: the node's fields, and a node's path acceptance probability.

Deliberately does not know: how nodes are merged, committed or selected.

Called by: the trie and its selections.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.drafts import DraftClaim, SiblingDraws

DEFAULT_CONFIDENCE = 0.5
"""Used for a token whose drafter sent no confidence; a known value replaces it when one arrives."""


class TrieNode:
    """One proposed token.

    Attributes:
        token: proposed token id; -1 for the root, whose token is committed.
        parent: node above; None for the root.
        confidence: probability that the token is accepted given that its parent was; None while unknown.
        claim: what the drafter said about the token; None while it said nothing.
        draws: the draw that the token belongs to; None where the token was not drawn.
        order: rank of arrival, from 1.
    """

    __slots__ = ("children", "claim", "confidence", "draws", "order", "parent", "token")

    def __init__(
        self,
        token: int,
        parent: TrieNode | None,
        confidence: float | None,
        draws: SiblingDraws | None,
        order: int,
    ) -> None:
        self.token = token
        self.parent = parent
        self.confidence = confidence
        self.claim: DraftClaim | None = None
        self.draws = draws
        self.order = order
        self.children: dict[int, TrieNode] = {}

    @classmethod
    def new_root(cls) -> TrieNode:
        """A root without children."""
        return cls(-1, None, None, None, 0)

    @property
    def known_confidence(self) -> float:
        """The confidence, or the default where no drafter sent one."""
        return DEFAULT_CONFIDENCE if self.confidence is None else self.confidence

    @property
    def confidence_before_draw(self) -> float:
        """A confidence that does not depend on the token's value: the default for a drawn token."""
        return DEFAULT_CONFIDENCE if self.draws is not None else self.known_confidence

    def first_arrived_child(self) -> TrieNode:
        """The child that was proposed first; the node must have children."""
        return min(self.children.values(), key=lambda child: child.order)


def walk(root: TrieNode) -> Iterator[tuple[TrieNode, int, float]]:
    """Every node below the root with its depth and path acceptance probability, parents before children.

    The path acceptances use no value of a drawn token: each drawn token counts with the default confidence.
    """
    stack = [(child, 1, child.confidence_before_draw) for child in root.children.values()]
    while stack:
        node, depth, path_acceptance = stack.pop()
        yield node, depth, path_acceptance
        for child in node.children.values():
            stack.append((child, depth + 1, path_acceptance * child.confidence_before_draw))
