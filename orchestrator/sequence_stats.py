"""Statistics of one request: how many target passes it took, and how many draft tokens they accepted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceStats:
    """Counts of one request; constant work per commit.

    Attributes:
        num_passes: target passes that committed at least one token.
        num_draft_tokens: draft tokens verified.
        num_accepted_tokens: draft tokens accepted.
        depths: passes by depth of the verified tree.
        accepted: passes by number of accepted draft tokens.
    """

    num_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    depths: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, num_draft_tokens: int, depth: int, num_accepted: int) -> None:
        """Counts one commit."""
        self.num_passes += 1
        if num_draft_tokens or depth:
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += num_accepted
            self.depths[depth] += 1
            self.accepted[num_accepted] += 1


def passes_per_position(by_depth: Counter[int]) -> list[int]:
    """From "passes by depth" to "passes that reached depth i + 1"."""
    counts = [0] * max(by_depth, default=0)
    for depth, passes in by_depth.items():
        for position in range(depth):
            counts[position] += passes
    return counts
