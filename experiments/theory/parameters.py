"""The numbers that closed forms of speculation start from.

Responsible for: their names, units and ranges. All times are in units of a plain step of the target (one row
for one sequence), so every result is a speed over plain decoding.

Deliberately does not know: measurements, seconds, any formula.

Called by: the other files of this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


def flat(_: int) -> float:
    """A step whose cost does not depend on its rows; memory-bound targets come close to it."""
    return 1.0


@dataclass(frozen=True, slots=True)
class CycleParams:
    """One sequence's speculation cycle, in units of a plain step of the target.

    Attributes:
        acceptance: probability `a` that a drafted token is accepted given that all before it were; sum over
            tokens of min(p, q) (Leviathan et al., arXiv 2211.17192, section 3), assumed equal at every
            position. In [0, 1).
        draft_cost: `c`, time to draft one token. Not negative.
        round_trip: `r`, network and serialisation both ways, queueing included. Not negative.
        draft_length: `g`, tokens per draft. At least 0.
        verify_cost: `v(n)`, a step over n rows. v(1) is 1 for a single sequence; it must not fall.

    Raises:
        ValueError: a number is outside its range.
    """

    acceptance: float
    draft_cost: float
    round_trip: float = 0.0
    draft_length: int = 4
    verify_cost: Callable[[int], float] = flat

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance < 1:
            raise ValueError(f"acceptance must be in [0, 1), got {self.acceptance!r}")
        for name in ("draft_cost", "round_trip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")
        if self.draft_length < 0:
            raise ValueError(f"draft_length must not be negative, got {self.draft_length!r}")

    @property
    def step(self) -> float:
        """The step that verifies the whole draft: v(g + 1)."""
        return self.verify_cost(self.draft_length + 1)

    @property
    def drafting(self) -> float:
        """Time to draft a whole draft: c g."""
        return self.draft_cost * self.draft_length
