"""Draft entries that start ahead of the committed length and wait for it.

Responsible for: keeping such entries in a bounded space, in order of their start.

Deliberately does not know: the trie's nodes.

Called by: the trie.
"""

from __future__ import annotations

from paceline.drafts import DraftEntry


class EarlyEntries:
    """Entries in order of their start.

    Args:
        max_tokens: bound on the tokens of all entries together. Above it, the entries that start furthest ahead leave.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: list[DraftEntry] = []
        self.num_tokens = 0

    def add(self, entry: DraftEntry) -> int:
        """Keep an entry, unless the same entry is kept already; returns how many tokens had to leave."""
        for other in self._entries:
            same_path = (other.start, other.tokens, other.parents) == (
                entry.start,
                entry.tokens,
                entry.parents,
            )
            if same_path and (other.confidences, other.log_probs) == (entry.confidences, entry.log_probs):
                return 0
        self._entries.append(entry)
        self._entries.sort(key=lambda early: early.start)
        self.num_tokens += len(entry.tokens)
        num_evicted = 0
        while self.num_tokens > self._max_tokens:
            num_tokens = len(self._entries.pop().tokens)
            self.num_tokens -= num_tokens
            num_evicted += num_tokens
        return num_evicted

    def pop_due(self, committed_length: int) -> DraftEntry | None:
        """Remove and return the entry with the smallest start that the committed length has reached, if any."""
        if not self._entries or self._entries[0].start > committed_length:
            return None
        entry = self._entries.pop(0)
        self.num_tokens -= len(entry.tokens)
        return entry

    def clear(self) -> None:
        """Drop all entries."""
        self._entries, self.num_tokens = [], 0
