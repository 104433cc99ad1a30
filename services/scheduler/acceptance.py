"""Acceptance of a subject by position: a part of services.scheduler.measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.scheduling import AcceptanceEstimator
from services.scheduler.layout import SchemaError, batch_scale, faded_sum, integer, number

_ACCEPTANCE_HALF_LIFE = 1024.0  # passes: a few seconds of traffic, an error of about 1%


@dataclass(frozen=True, slots=True)
class AcceptancePart:
    """Decayed trials and acceptances per position, and how many passes there ever were."""

    name: ClassVar[str] = "acceptance"
    count: int = 0
    attempts: tuple[float, ...] = ()
    accepts: tuple[float, ...] = ()

    @classmethod
    def of(cls, drafted: tuple[int, ...], accepted: tuple[int, ...]) -> Self:
        """From counts of passes per position (neither rises with the position, accepted <= drafted).

        A trial of position i is a pass that verified it and accepted all tokens before it. The counts do not
        say which of the passes that accepted i - 1 were longer than i, so the fraction of all passes of that
        length is used. This is exact when all drafts have one length.
        """
        if not drafted or drafted[0] == 0:
            return cls()
        attempts, accepts = [float(drafted[0])], [float(accepted[0])]
        for i in range(1, len(drafted)):
            if not drafted[i] or not accepted[i - 1]:
                break
            guess = accepted[i - 1] * drafted[i] / drafted[i - 1]
            attempts.append(max(float(accepted[i]), min(guess, accepted[i - 1], drafted[i])))
            accepts.append(float(accepted[i]))
        num_passes = drafted[0]
        scale = batch_scale(num_passes, _ACCEPTANCE_HALF_LIFE)
        return cls(num_passes, tuple(a * scale for a in attempts), tuple(a * scale for a in accepts))

    def merged(self, newer: Self) -> Self:
        """This part with newer passes added; its own counts fade by their number."""
        fade = 2.0 ** (-newer.count / _ACCEPTANCE_HALF_LIFE)
        return type(self)(
            self.count + newer.count,
            faded_sum(self.attempts, newer.attempts, fade),
            faded_sum(self.accepts, newer.accepts, fade),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON layout."""
        return {"count": self.count, "attempts": list(self.attempts), "accepts": list(self.accepts)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        attempts = tuple(number(n, 1e9) for n in value["attempts"][:MAX_DRAFT_LENGTH])
        accepts = tuple(number(n, 1e9) for n in value["accepts"][:MAX_DRAFT_LENGTH])
        if len(attempts) != len(accepts):
            raise SchemaError("attempts and accepts differ in length")
        return cls(integer(value["count"], 0, 2**53), attempts, accepts)

    def estimator(self) -> AcceptanceEstimator:
        """Conditional acceptance per position."""
        if not self.attempts:
            return AcceptanceEstimator(half_life=_ACCEPTANCE_HALF_LIFE)
        accepts = [min(hits, trials) for hits, trials in zip(self.accepts, self.attempts, strict=True)]
        value = {"schema_version": 1, "attempts": list(self.attempts), "accepts": accepts}
        return AcceptanceEstimator.from_dict(value, half_life=_ACCEPTANCE_HALF_LIFE)
