"""The draft trie: all proposed continuations of one sequence, rooted at its last committed token.

Where a draft token is added: `DraftTrie.add`. Where rejected draft tokens are dropped: `DraftTrie.commit`.
"""

from __future__ import annotations

from paceline.drafts import EMPTY_TREE, DraftClaim, DraftEntry, DraftError, DraftTree, DrawRule, SiblingDraws
from paceline.trie.draft_trie import AddResult, CommitResult, DraftTrie
from paceline.trie.node import DEFAULT_CONFIDENCE

__all__ = [
    "DEFAULT_CONFIDENCE",
    "EMPTY_TREE",
    "AddResult",
    "CommitResult",
    "DraftClaim",
    "DraftEntry",
    "DraftError",
    "DraftTree",
    "DraftTrie",
    "DrawRule",
    "SiblingDraws",
]
