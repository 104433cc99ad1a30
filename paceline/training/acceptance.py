"""Counts of how far drafted chains are accepted. Pure arithmetic; called by objectives and the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Sums over chains of one length.

    Attributes:
        reached: per depth, chains whose earlier tokens were all accepted.
        accepted: per depth, chains accepted up to and including it.
    """

    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @classmethod
    def from_chains(cls, right: Tensor) -> AcceptanceCounts:
        """Counts from ``right`` bool ``[chains, depth]``: would the target choose this token here."""
        alive = right.int().cumprod(dim=1)
        accepted = tuple(int(x) for x in alive.sum(0))
        return cls(reached=(right.shape[0], *accepted[:-1]), accepted=accepted)

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        if not self.reached:
            return other
        if not other.reached:
            return self
        return AcceptanceCounts(
            tuple(a + b for a, b in zip(self.reached, other.reached, strict=True)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
        )

    @property
    def per_depth(self) -> list[float]:
        """P(accepted at depth d | everything before was accepted)."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens accepted per chain; a round commits one token more."""
        return sum(self.accepted) / self.reached[0] if self.reached and self.reached[0] else 0.0
