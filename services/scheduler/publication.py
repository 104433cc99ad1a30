"""A policy as it is published: what the planner decided plus what consumers need besides.

Responsible for: fields, ranges, JSON and protobuf forms, and the rule for versions. Deliberately does not
know: how it was decided, where it is kept.

Versions are unix milliseconds at the time of the decision, raised where needed so that each is above every
earlier one this process or Redis knows. So they rise even when scheduler and Redis both restart empty, which
a counter would not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.scheduling import Policy
from paceline.v1 import scheduler_pb2

_FIELDS = ("draft_length", "node_budget", "max_nodes_per_step", "draft_ahead", "outcomes")
_WAIT_TOLERANCE = 0.15  # measured round trips move by less all the time
_MAX = {
    "draft_length": 64,
    "node_budget": 1024,
    "max_nodes_per_step": 8192,
    "wait_budget_us": 1_000_000,
    "draft_ahead": 64,
    "outcomes": 64,
}


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """A policy in force for one subject.

    Attributes:
        version: rises with every publication.
        draft_length: tokens per draft; 0 turns speculation off.
        node_budget: most draft nodes of one sequence in one step.
        max_nodes_per_step: most draft nodes over all sequences of one step.
        wait_budget_us: longest draft wait of a step for drafts that are due.
        draft_ahead: tokens to draft ahead while the target verifies.
        outcomes: outcomes of a step to draft past while the target verifies.
        expected_speedup: over plain decoding.
        reason: the figures that decided, for people.
    """

    version: int
    draft_length: int
    node_budget: int
    max_nodes_per_step: int
    wait_budget_us: int
    draft_ahead: int
    outcomes: int
    expected_speedup: float
    reason: str

    @classmethod
    def of(
        cls, policy: Policy, *, version: int, max_nodes_per_step: int, expected_speedup: float
    ) -> PublishedPolicy:
        """From the planner's policy."""
        return cls(
            version=version,
            draft_length=min(policy.draft_length, _MAX["draft_length"]),
            node_budget=min(policy.node_budget, _MAX["node_budget"]),
            max_nodes_per_step=max_nodes_per_step,
            wait_budget_us=min(policy.wait_budget_us, _MAX["wait_budget_us"]),
            draft_ahead=min(policy.draft_ahead, _MAX["draft_ahead"]),
            outcomes=min(policy.outcomes, _MAX["outcomes"]),
            expected_speedup=expected_speedup,
            reason=policy.reason,
        )

    def with_version(self, version: int) -> PublishedPolicy:
        """The same decision under another version."""
        return dataclasses.replace(self, version=version)

    def differs_from(self, other: PublishedPolicy) -> bool:
        """Whether applying one instead of the other changes anything; a hold that moved a little does not."""
        if any(getattr(self, name) != getattr(other, name) for name in _FIELDS):
            return True
        return abs(self.wait_budget_us - other.wait_budget_us) > _WAIT_TOLERANCE * max(
            self.wait_budget_us, other.wait_budget_us
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> PublishedPolicy:
        """Read `to_dict`'s value back.

        Raises:
            ValueError: a field is missing or out of range.
        """
        for name, limit in (*_MAX.items(), ("version", 2**63 - 1)):
            if type(value.get(name)) is not int or not 0 <= value[name] <= limit:
                raise ValueError(f"{name} must be an integer from 0 to {limit}")
        speedup = value.get("expected_speedup")
        if (
            not isinstance(speedup, int | float)
            or not math.isfinite(speedup)
            or not isinstance(value["reason"], str)
        ):
            raise ValueError("expected_speedup or reason is missing")
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: value[name] for name in names})

    def to_proto(self) -> scheduler_pb2.SpeculationPolicy:
        """Wire form."""
        return scheduler_pb2.SpeculationPolicy(
            version=self.version,
            draft_length=self.draft_length,
            max_nodes_per_sequence=self.node_budget,
            max_nodes_per_step=self.max_nodes_per_step,
            wait_budget_us=self.wait_budget_us,
            draft_ahead=self.draft_ahead,
            outcomes=self.outcomes,
            reason=self.reason,
            expected_speedup=self.expected_speedup,
        )


def next_version(unix_ms: int, newest_known: int) -> int:
    """The version of a decision made now (see the module's docstring)."""
    return max(unix_ms, newest_known + 1)
