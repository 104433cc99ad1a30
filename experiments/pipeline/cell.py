"""What is measured: a point of the theory, and the cycles that are run there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from experiments.dials.dials import Dials
from experiments.dials.policy import FixedPolicy
from experiments.dials.step_clock import StretchCurve
from paceline.contract.errors import InvalidRequestError

WAIT_BUDGET_US = 1_000_000
"""A hold that ends when the draft comes, not before: the longest that a policy may ask for."""

MAX_NODES = 64
"""Nodes of one sequence in one step, the most that frames allow."""


class Cycle(StrEnum):
    """How drafting and verification take turns."""

    PLAIN = "plain"
    """No drafts."""
    SYNCHRONOUS = "synchronous"
    """Each waits for the other."""
    AHEAD = "ahead"
    """The drafter goes on from the end of its draft while the target verifies; no step waits."""
    ENUMERATE = "enumerate"
    """The drafter drafts past the likely outcomes while the target verifies; a step waits where none came about."""
    PLANNED = "planned"
    """As the scheduler decides, from what it has measured."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a cycle.

    Attributes:
        draft_length: tokens of a draft; 0 leaves all of them to the scheduler.
        draft_ahead: tokens past it, or past each outcome.
        outcomes: outcomes drafted past.
        wait_budget_us: longest wait of a step for a draft that is due.
    """

    draft_length: int
    draft_ahead: int = 0
    outcomes: int = 0
    wait_budget_us: int = 0

    def policy(self, version: int) -> FixedPolicy | None:
        """As verifier and drafter are told; None: what the scheduler says."""
        if not self.draft_length:
            return None
        return FixedPolicy(
            version=version,
            draft_length=self.draft_length,
            draft_ahead=self.draft_ahead,
            num_outcomes=self.outcomes,
            wait_budget_us=self.wait_budget_us,
            # A tree may hold more than one path; a chain past the draft is verified as far as it has come in.
            max_nodes_per_sequence=MAX_NODES if self.draft_ahead else self.draft_length,
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """A point: who drafts, how far away, and for how many at once.

    Attributes:
        dials: of the drafter; its draft times are milliseconds.
        round_trip_ms: between conductor and drafter.
        curve: how long a step of so many rows lasts.
        num_sequences: sequences that run at once.
    """

    dials: Dials
    round_trip_ms: float
    curve: StretchCurve
    num_sequences: int = 1

    @property
    def plain_step_ms(self) -> float:
        """A step without drafts: what all other times are measured against."""
        return self.curve.step_s(self.num_sequences) * 1e3

    @property
    def cost(self) -> float:
        """Time of one draft token over that of a plain step: c of the theory, parallel rows and calls left out."""
        return self.dials.draft_ms / self.plain_step_ms

    @property
    def round_trip(self) -> float:
        """The round trip over a plain step: r of the theory."""
        return self.round_trip_ms / self.plain_step_ms

    def verify_cost(self, num_rows: int) -> float:
        """A step with so many rows of each sequence, over a plain one: v of the theory."""
        return self.curve.step_s(self.num_sequences * num_rows) * 1e3 / self.plain_step_ms

    def draft_cost(self, num_tokens: int) -> float:
        """A draft of so many tokens for every sequence, over a plain step: c times g of the theory."""
        return self.dials.draft_s(num_tokens, self.num_sequences) * 1e3 / self.plain_step_ms


def parse_list(text: str, name: str, least: float = 0.0) -> list[float]:
    """Numbers separated by commas.

    Raises:
        InvalidRequestError: something else, or a number below `least`.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequestError(name, f"expected numbers separated by commas, got {text!r}") from None
    if any(not number >= least for number in numbers):
        raise InvalidRequestError(name, f"no number may be below {least:g}, got {text!r}")
    return numbers


def parse_counts(text: str, name: str, most: int) -> list[int]:
    """Whole numbers from 1 to `most`, separated by commas.

    Raises:
        InvalidRequestError: something else.
    """
    numbers = parse_list(text, name, 1)
    if any(number > most or number != int(number) for number in numbers):
        raise InvalidRequestError(name, f"expected whole numbers up to {most}, got {text!r}")
    return [int(number) for number in numbers]


def round_trips_ms(texts: Sequence[str], step_ms: float) -> list[float]:
    """Round trips such as ``5`` (milliseconds) or ``0.5T`` (plain steps)."""
    found = []
    for text in texts:
        is_steps = text.strip().upper().endswith("T")
        (number,) = parse_list(text.strip()[:-1] if is_steps else text, "round_trips")
        found.append(number * step_ms if is_steps else number)
    return found
