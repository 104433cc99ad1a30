"""Counts over target passes. Nothing here depends on time."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.decoding.generation import Pass


@dataclass(slots=True)
class Tally:
    """Counts over generations.

    Attributes:
        sum_squares: of the tokens of each pass.
        drafted_at: passes that verified a token at depth i + 1.
        accepted_at: passes that accepted one.
        num_sent: drafted tokens packed.
        num_sent_bytes: what they took on the wire, framing of their batch included.
    """

    num_passes: int = 0
    num_tokens: int = 0
    sum_squares: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    num_sent: int = 0
    num_sent_bytes: int = 0

    def add(self, one: Pass) -> None:
        """Count a pass."""
        num_tokens, depth, num_accepted = len(one.tokens), max(one.tree.depths, default=0), one.num_accepted
        self.num_sent += 0 if one.draft is None else len(one.draft.tokens)
        self.num_sent_bytes += one.num_draft_bytes
        self.num_passes += 1
        self.num_tokens += num_tokens
        self.sum_squares += num_tokens**2
        for counts, reached in ((self.drafted_at, depth), (self.accepted_at, num_accepted)):
            counts.extend([0] * (depth - len(counts)))
            for place in range(reached):
                counts[place] += 1

    @property
    def tokens_per_pass(self) -> float:
        """1 is plain decoding."""
        return self.num_tokens / max(1, self.num_passes)

    @property
    def standard_error(self) -> float:
        """Of `tokens_per_pass`, passes taken as independent."""
        num_passes = max(1, self.num_passes)
        variance = self.sum_squares / num_passes - self.tokens_per_pass**2
        return float((max(variance, 0.0) / num_passes) ** 0.5)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the passes that verified a depth that accepted it too."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def bytes_per_token(self) -> float:
        """Bytes for a drafted token on the wire."""
        return self.num_sent_bytes / max(1, self.num_sent)
