"""Draft entries for the trie's tests."""

from __future__ import annotations

from paceline.drafts import DraftEntry

COMMITTED = [7, 8, 9]


def chain(start: int, tokens: list[int], confidence: float = 0.5) -> DraftEntry:
    return DraftEntry.chain(start, tokens, confidences=[confidence] * len(tokens))
