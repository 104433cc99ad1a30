"""What a plan depends on.

Responsible for: names, units and ranges of the inputs, and the probabilities that follow from acceptance.

Deliberately does not know: where inputs were measured, what a choice costs (`cycles`), what is decided
(`planner`).

Called by: the scheduler service and the simulator create inputs; `cycles`, `planner` and `state` read them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from paceline.scheduling.outcomes import outcome_hit_rates

_LEAST_ODDS = 1e-4


class DrafterPlacement(StrEnum):
    """Where a sequence's drafter runs: in the verifier's process, or in a process of its own."""

    COLOCATED = "colocated"
    SEPARATE = "separate"


@dataclass(frozen=True, slots=True)
class MeasuredHits:
    """How often a step's verification outcome had been drafted past.

    Attributes:
        rate: fraction of steps, 0 to 1.
        draft_length: tokens of the drafts that were verified in these steps.
        num_outcomes: outcomes that were drafted past; at least 1.
    """

    rate: float
    draft_length: int
    num_outcomes: int

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1 or self.draft_length < 1 or self.num_outcomes < 1:
            raise ValueError(f"rate must be in [0, 1], draft_length and num_outcomes at least 1: {self}")


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything a plan depends on.

    Attributes:
        placement: which cost model applies.
        acceptance: conditional acceptance per draft position; positions beyond the last repeat it.
        step_time: seconds of a target step over that many rows.
        draft_time: seconds to draft that many tokens for every sequence, at the present load.
        rtt_s: mean time on the wire and in serialisation, both ways. Ignored when co-located.
        rtt_p95_s: 95th percentile of the round trip, for the wait budget; None takes the mean.
        queue_s: mean wait at the drafter until it begins.
        overlap_s: how much of draft and round trip is hidden, behind the target's own bookkeeping or because
            features travel beside commits. At most half of the whole wait counts.
        concurrent_slowdown: the fraction by which a step takes longer while the drafter works: 0 on separate
            machines, more where target and drafter use one memory bus.
        num_sequences: sequences that decode together.
        max_draft_length: the longest draft allowed.
        max_nodes: most draft nodes per sequence and step.
        max_wait_s: the longest a sequence may wait.
        margin: speculation must be faster than plain decoding by this fraction.
        max_outcomes: most verification outcomes that a separate drafter may draft past during a step; 0 where
            it cannot.
        speculation_cache_time: seconds to draft past (outcomes, tokens each) for every sequence, at the present
            load. None takes a draft's time for each outcome, the worst case.
        sibling_acceptance: chance that the drafter's next choice is the target's token, given that its earlier
            choices were not. None takes half the acceptance of a first choice; independent choices would reach
            all of it.
        ahead_fraction: of the tokens that a draft from true features gets accepted, the fraction that a draft
            past an outcome gets, which is made from the drafter's own outputs. 1 for drafters that read tokens
            alone.
        measured_hits: corrects the hit rate that follows from acceptance; None where nothing was measured.
    """

    placement: DrafterPlacement
    acceptance: tuple[float, ...]
    step_time: Callable[[int], float]
    draft_time: Callable[[int], float]
    rtt_s: float = 0.0
    rtt_p95_s: float | None = None
    queue_s: float = 0.0
    overlap_s: float = 0.0
    concurrent_slowdown: float = 0.0
    num_sequences: int = 1
    max_draft_length: int = 8
    max_nodes: int = 32
    max_wait_s: float = 0.05
    margin: float = 0.05
    max_outcomes: int = 0
    speculation_cache_time: Callable[[int, int], float] | None = None
    sibling_acceptance: float | None = None
    ahead_fraction: float = 1.0
    measured_hits: MeasuredHits | None = None

    def __post_init__(self) -> None:
        if not all(0 <= rate <= 1 for rate in self.acceptance):
            raise ValueError(f"acceptance rates must lie between 0 and 1: {self.acceptance}")
        for field in ("rtt_s", "queue_s", "overlap_s", "concurrent_slowdown", "max_wait_s", "margin"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field} must be finite and not negative, got {value!r}")
        if self.rtt_p95_s is not None and not (math.isfinite(self.rtt_p95_s) and self.rtt_p95_s >= 0):
            raise ValueError(f"rtt_p95_s must be finite and not negative, got {self.rtt_p95_s!r}")
        if self.num_sequences < 1 or min(self.max_draft_length, self.max_nodes, self.max_outcomes) < 0:
            raise ValueError(
                "num_sequences must be at least 1, max_draft_length, max_nodes and max_outcomes not negative"
            )
        if not 0 <= self.ahead_fraction <= 1:
            raise ValueError(f"ahead_fraction must lie between 0 and 1, got {self.ahead_fraction!r}")
        if self.sibling_acceptance is not None and not 0 <= self.sibling_acceptance <= 1:
            raise ValueError(f"sibling_acceptance must lie between 0 and 1, got {self.sibling_acceptance!r}")

    @property
    def slowest_rtt_s(self) -> float:
        """The round trip that the wait budget allows for."""
        return self.rtt_s if self.rtt_p95_s is None else max(self.rtt_p95_s, self.rtt_s)

    def wait_s(self, length: int) -> float:
        """Seconds from the end of a step until a draft of this length has arrived."""
        whole_s = self.whole_wait_s(length)
        return whole_s - min(self.overlap_s, whole_s / 2)

    def whole_wait_s(self, length: int) -> float:
        """The same without any overlap."""
        return self.draft_time(length) + self.rtt_s + self.queue_s

    @property
    def longest_draft(self) -> int:
        """Tokens of the longest draft that may be verified."""
        return min(self.max_draft_length, self.max_nodes)

    def path_acceptances(self, length: int) -> list[float]:
        """P(token j and all before it accepted) for j in 1..length."""
        rates = [*self.acceptance[:length]]
        rates += [rates[-1] if rates else 0.0] * (length - len(rates))
        return list(itertools.accumulate(rates, lambda product, rate: product * rate))

    def speculation_cache_s(self, outcomes: int, ahead: int) -> float:
        """Seconds to draft ``ahead`` tokens past each of some outcomes."""
        if self.speculation_cache_time is not None:
            return self.speculation_cache_time(outcomes, ahead)
        return outcomes * self.draft_time(ahead)

    def hit_rates(self, draft_length: int, max_outcomes: int) -> tuple[float, ...]:
        """P(a step's outcome is among the likeliest 1, 2, .. ``max_outcomes``) when a draft of this length is
        verified.

        A measured hit rate changes the odds of all estimates by the factor by which it changes the odds of its
        own.
        """
        estimates = self._estimated_hit_rates(draft_length, max_outcomes)
        measured = self.measured_hits
        if measured is None:
            return estimates
        there = self._estimated_hit_rates(measured.draft_length, measured.num_outcomes)[-1]
        factor = _odds(measured.rate) / _odds(there)
        return tuple(
            odds / (1 + odds) if rate > 0 else 0.0
            for rate, odds in ((rate, factor * _odds(rate)) for rate in estimates)
        )

    def _estimated_hit_rates(self, draft_length: int, max_outcomes: int) -> tuple[float, ...]:
        sibling = self.sibling_acceptance
        if sibling is None:
            sibling = self.acceptance[0] / 2 if self.acceptance else 0.0
        return outcome_hit_rates(self.acceptance, sibling, draft_length, max_outcomes)


def _odds(rate: float) -> float:
    inside = min(max(rate, _LEAST_ODDS), 1 - _LEAST_ODDS)
    return inside / (1 - inside)
