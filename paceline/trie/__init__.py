"""The draft trie: all proposed continuations of one sequence, rooted at its last committed token.

Where a draft token is added: `DraftTrie.add`. Where rejected draft tokens are dropped: `DraftTrie.commit`.
"""

from paceline.trie.draft_trie import AddResult, CommitResult, DraftTrie
from paceline.trie.node import DEFAULT_CONFIDENCE

__all__ = ["DEFAULT_CONFIDENCE", "AddResult", "CommitResult", "DraftTrie"]
