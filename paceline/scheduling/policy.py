"""The policy: what the planner decided, as it is published and applied.

Responsible for: the fields, their ranges, and their JSON form.

Deliberately does not know: how they were decided, who applies them.

Called by: the planner (makes it), the scheduler service (stores and publishes it), verifier and conductor
(apply it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Policy:
    """How to speculate until the next policy.

    Attributes:
        version: rises whenever anything else changes.
        draft_length: tokens a drafter is asked for from a committed length; 0 turns speculation off.
        node_budget: draft nodes verified per sequence and step, at most.
        wait_budget_us: microseconds a sequence may miss a step because its draft is about to land; 0 never waits.
        draft_ahead: tokens the drafter goes on drafting beyond ``draft_length`` while the target verifies.
        reason: one line for people.
        outcomes: outcomes of a step that are drafted past, each for ``draft_ahead`` tokens, while the target
            verifies; 0 goes on from the end of the draft alone.
    """

    version: int
    draft_length: int
    node_budget: int
    wait_budget_us: int
    draft_ahead: int
    reason: str
    outcomes: int = 0

    def __post_init__(self) -> None:
        for field in ("version", "draft_length", "node_budget", "wait_budget_us", "draft_ahead", "outcomes"):
            value = getattr(self, field)
            if type(value) is not int or value < 0:
                raise ValueError(f"{field} must be an integer of at least 0, got {value!r}")
        if not isinstance(self.reason, str):
            raise ValueError(f"reason must be text, got {self.reason!r}")

    @classmethod
    def off(cls, version: int, reason: str) -> Policy:
        """Plain decoding."""
        return cls(version, 0, 0, 0, 0, reason)

    @property
    def is_speculating(self) -> bool:
        """Whether drafters are asked for anything."""
        return self.draft_length > 0

    def differs_from(self, other: Policy) -> bool:
        """Whether applying one instead of the other changes anything; version and reason do not count."""
        return dataclasses.replace(self, version=0, reason="") != dataclasses.replace(
            other, version=0, reason=""
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Policy:
        """Read `to_dict`'s value back.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if set(value) != names:
            raise ValueError(f"a policy has the fields {sorted(names)}, got {sorted(value)}")
        return cls(**value)
