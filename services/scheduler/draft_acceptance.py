"""Acceptance of drafted tokens by drafter and confidence: a part of services.scheduler.measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from paceline.contract.limits import MAX_REPORTED_DRAFTERS
from paceline.scheduling.reliability import Reliability
from services.scheduler.layout import text

OTHER = "other"
"""Name of all drafters beyond MAX_REPORTED_DRAFTERS."""


@dataclass(frozen=True, slots=True)
class DrafterAcceptance:
    """One drafter's tables: by its own probabilities, and by calibrated confidences."""

    own: Reliability = field(default_factory=Reliability)
    calibrated: Reliability = field(default_factory=Reliability)

    def merged(self, newer: DrafterAcceptance) -> DrafterAcceptance:
        """These tables with newer trials added."""
        return DrafterAcceptance(self.own.merged(newer.own), self.calibrated.merged(newer.calibrated))


@dataclass(frozen=True, slots=True)
class DraftAcceptancePart:
    """Tables by drafter, and how many trials there ever were."""

    name: ClassVar[str] = "outcomes"
    drafters: Mapping[str, DrafterAcceptance] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Trials ever."""
        return sum(tables.own.count for tables in self.drafters.values())

    def merged(self, newer: Self) -> Self:
        """This part with newer trials added; drafters beyond MAX_REPORTED_DRAFTERS are counted as one."""
        drafters = dict(self.drafters)
        for name, tables in newer.drafters.items():
            key = name if name in drafters or len(drafters) < MAX_REPORTED_DRAFTERS else OTHER
            drafters[key] = drafters.get(key, DrafterAcceptance()).merged(tables)
        return type(self)(drafters)

    def to_dict(self) -> dict[str, Any]:
        """JSON layout."""
        return {
            "count": self.count,
            "drafters": [
                {"drafter": name, "own": tables.own.to_dict(), "calibrated": tables.calibrated.to_dict()}
                for name, tables in sorted(self.drafters.items())
            ],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        return cls(
            {
                text(tables["drafter"]): DrafterAcceptance(
                    Reliability.from_dict(tables["own"]), Reliability.from_dict(tables["calibrated"])
                )
                for tables in value["drafters"][: MAX_REPORTED_DRAFTERS + 1]
            }
        )

    def estimator(self) -> Mapping[str, DrafterAcceptance]:
        """The tables by drafter."""
        return self.drafters
