"""The children of every row of a drafted tree, for the modes that verify draws.

Responsible for: which nodes are below a row, in the order of their draws, and the distribution they were drawn
from.

Deliberately does not know: noise, the target's probabilities, the trie.

Called by: `tree_rejection`, `block`.
"""

from __future__ import annotations

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftError, SiblingDraws
from paceline.sampling.distribution import DraftDistribution


def children_of(tree: DraftTree) -> dict[int, list[int]]:
    """The node indices of each row's children, in order, for rows with children; row 0 is the root, row i + 1 node
    i.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent + 1, []).append(node)
    return children


def draws_of(tree: DraftTree, node: int) -> SiblingDraws | None:
    """How a node's token was drawn; None where it was not drawn."""
    return tree.draft_dists[node] if tree.draft_dists else None


def distribution_of(draws: SiblingDraws) -> DraftDistribution:
    """The distribution that siblings were drawn from.

    Raises:
        TypeError: it is not a `DraftDistribution`. That is a bug in this process: the wire codec makes nothing
            else.
    """
    if not isinstance(draws.distribution, DraftDistribution):
        raise TypeError(f"siblings were drawn from a {type(draws.distribution).__name__}")
    return draws.distribution


def check_tokens(tree: DraftTree, vocab: int) -> None:
    """Refuse tokens outside the vocabulary, before one indexes a row.

    Raises:
        DraftError: naming the token.
    """
    for token in tree.tokens:
        if not 0 <= token < vocab:
            raise DraftError(f"draft token {token} is outside the vocabulary of {vocab}")
