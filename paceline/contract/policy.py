"""The policy in its two forms: what the scheduler publishes, and what a process uses in each step.

The planner decides a `SpeculationPolicy`, and the scheduler publishes it. The conductor makes a `StepPolicy` of it
(`step_policy`), with the operator's overrides on top, and sends that to the verifier and the drafters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.contract import limits
from paceline.contract.fields import check_integer
from paceline.v1 import peer_pb2, scheduler_pb2

_LIMITS = {
    "version": 2**63 - 1,
    "draft_length": limits.MAX_DRAFT_LENGTH,
    "draft_ahead": limits.MAX_DRAFT_LENGTH,
    "num_outcomes": limits.MAX_OUTCOMES,
    "max_nodes_per_sequence": limits.MAX_DRAFT_NODES,
    "max_nodes_per_step": limits.MAX_STEP_NODES,
    "wait_budget_us": limits.MAX_WAIT_BUDGET_US,
    "max_prefill_tokens_per_step": limits.MAX_PREFILL_TOKENS,
}


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """How to speculate until the next policy.

    Attributes:
        version: rises with every publication; 0 before the first.
        draft_length: tokens per draft; 0 turns speculation off.
        max_nodes_per_sequence: most draft nodes of one sequence in one step, beside its n-gram proposal.
        wait_budget_us: microseconds that a step may wait for drafts that are due; 0 never waits.
        draft_ahead: tokens that a drafter drafts past a draft, or past each outcome, while the target verifies.
        reason: what decided, in one line for people.
        num_outcomes: verification outcomes of a step that are drafted past while the target verifies. 0 drafts past the
            end of the draft alone.
        max_nodes_per_step: most draft nodes over all sequences of one step, beside the tokens of n-gram proposals;
            never below `max_nodes_per_sequence` when applied.
        expected_speedup: tokens per second over those of plain decoding.
    """

    version: int
    draft_length: int
    max_nodes_per_sequence: int
    wait_budget_us: int
    draft_ahead: int
    reason: str
    num_outcomes: int = 0
    max_nodes_per_step: int = 0
    expected_speedup: float = 1.0

    def __post_init__(self) -> None:
        for field in _PUBLISHED:
            value = getattr(self, field)
            if type(value) is not int or value < 0:
                raise ValueError(f"{field} must be an integer of at least 0, got {value!r}")
        if not isinstance(self.expected_speedup, int | float) or not math.isfinite(self.expected_speedup):
            raise ValueError(f"expected_speedup must be a finite number, got {self.expected_speedup!r}")
        if not isinstance(self.reason, str):
            raise ValueError(f"reason must be text, got {self.reason!r}")

    @classmethod
    def off(cls, version: int, reason: str) -> SpeculationPolicy:
        """Plain decoding."""
        return cls(version, 0, 0, 0, 0, reason)

    @classmethod
    def default(cls) -> SpeculationPolicy:
        """The policy before, or without, a scheduler."""
        return cls(
            version=0,
            draft_length=limits.DEFAULT_DRAFT_LENGTH,
            max_nodes_per_sequence=2 * limits.DEFAULT_DRAFT_LENGTH,
            max_nodes_per_step=limits.DEFAULT_STEP_NODES,
            wait_budget_us=limits.DEFAULT_WAIT_BUDGET_US,
            draft_ahead=limits.DEFAULT_DRAFT_LENGTH,
            reason="default: no scheduler has decided yet",
        )

    def within_limits(self) -> SpeculationPolicy:
        """The policy with every number lowered to its limit."""
        lowered = {field: min(getattr(self, field), _LIMITS[field]) for field in _PUBLISHED}
        return dataclasses.replace(self, **lowered)

    def differs_from(self, other: SpeculationPolicy, wait_tolerance: float = 0.0) -> bool:
        """Whether applying one instead of the other changes anything; version and reason do not count.

        Two wait budgets that differ by at most the fraction ``wait_tolerance`` count as equal.
        """
        compared = _PUBLISHED - {"version", "wait_budget_us"}
        if any(getattr(self, field) != getattr(other, field) for field in compared):
            return True
        largest = max(self.wait_budget_us, other.wait_budget_us)
        return abs(self.wait_budget_us - other.wait_budget_us) > wait_tolerance * largest

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> SpeculationPolicy:
        """Read `to_dict`'s value back.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if set(value) != names:
            raise ValueError(f"a policy has the fields {sorted(names)}, got {sorted(value)}")
        policy = cls(**value)
        for field in _PUBLISHED:
            check_integer(field, getattr(policy, field), 0, _LIMITS[field])
        return policy

    def to_proto(self) -> scheduler_pb2.SpeculationPolicy:
        """The message that the scheduler publishes."""
        return scheduler_pb2.SpeculationPolicy(**self.to_dict())

    @classmethod
    def from_proto(cls, message: scheduler_pb2.SpeculationPolicy) -> SpeculationPolicy:
        """Read a published policy; never fails, since a conductor must not stop for a bad one.

        A number above its limit counts as the limit, and a speed-up that is not finite as none.
        """
        values = {field.name: getattr(message, field.name) for field in dataclasses.fields(cls)}
        if not math.isfinite(values["expected_speedup"]):
            values["expected_speedup"] = 1.0
        return cls(**values).within_limits()


_PUBLISHED = frozenset(_LIMITS) - {"max_prefill_tokens_per_step"}


@dataclass(frozen=True, slots=True)
class PolicyOverrides:
    """What the operator fixed by flag; None leaves a field to the published policy.

    The fields are those of `SpeculationPolicy`. The scheduler does not decide ``max_prefill_tokens_per_step``.
    """

    draft_length: int | None = None
    draft_ahead: int | None = None
    wait_budget_us: int | None = None
    max_prefill_tokens_per_step: int = limits.DEFAULT_PREFILL_TOKENS
    max_nodes_per_sequence: int | None = None
    num_outcomes: int | None = None


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """What the verifier uses in each step and a drafter in each round. The defaults hold until the first one arrives.

    Attributes:
        version: of the published policy.
        draft_length: tokens per draft that the receiver itself makes; 0 stops its drafting. A verifier without a
            drafter of its own does not read it.
        draft_ahead: tokens to draft past a draft, or past each outcome, while the target verifies. Drafters read it.
        num_outcomes: verification outcomes of the step under way to draft past; 0 drafts past the end of the draft
            alone. Drafters read it.
        max_nodes_per_sequence: most draft nodes of one sequence in one step, and of one draft. More than the draft
            length asks for a tree. 0 verifies no drafts. The verifier adds the sequence's n-gram proposal.
        max_nodes_per_step: most draft nodes over all sequences of one step. The verifier reads this limit, and adds
            the tokens of n-gram proposals to it.
        wait_budget_us: microseconds that a step may wait for drafts that are due. The verifier reads it.
        max_prefill_tokens_per_step: most prompt tokens in one step. The verifier reads it.
    """

    version: int = 0
    draft_length: int = limits.DEFAULT_DRAFT_LENGTH
    draft_ahead: int = 0
    num_outcomes: int = 0
    max_nodes_per_sequence: int = 2 * limits.DEFAULT_DRAFT_LENGTH
    max_nodes_per_step: int = limits.DEFAULT_STEP_NODES
    wait_budget_us: int = 0
    max_prefill_tokens_per_step: int = limits.DEFAULT_PREFILL_TOKENS

    @property
    def is_drafting(self) -> bool:
        """Whether drafts are verified at all."""
        return self.max_nodes_per_sequence > 0

    def for_verifier(self, *, is_colocated: bool, is_drafter_due: bool) -> StepPolicy:
        """The policy for a verifier: it drafts only if it hosts the drafter, and waits only for drafts that are due."""
        return dataclasses.replace(
            self,
            draft_length=self.draft_length if is_colocated else 0,
            wait_budget_us=self.wait_budget_us if is_drafter_due else 0,
        )

    def to_proto(self) -> peer_pb2.StepPolicy:
        """The message that a conductor sends."""
        return peer_pb2.StepPolicy(**dataclasses.asdict(self))

    @classmethod
    def from_proto(cls, message: peer_pb2.StepPolicy) -> StepPolicy:
        """Check a policy from a conductor.

        Raises:
            InvalidRequestError: naming the field that is out of range.
        """
        values = {field.name: getattr(message, field.name) for field in dataclasses.fields(cls)}
        for field, value in values.items():
            check_integer(f"policy.{field}", value, 0, _LIMITS[field])
        policy = cls(**values)
        if policy.max_prefill_tokens_per_step:
            return policy
        return dataclasses.replace(policy, max_prefill_tokens_per_step=limits.DEFAULT_PREFILL_TOKENS)


def step_policy(published: SpeculationPolicy, overrides: PolicyOverrides) -> StepPolicy:
    """What a step uses of a published policy, with the operator's overrides on top.

    A field that depends on another is 0 where the other is: nothing is drafted ahead without drafts, and no outcomes
    are drafted past without tokens to draft ahead. A draft and the tokens past it fit one frame together.
    """

    def chosen(field: str) -> int:
        fixed = getattr(overrides, field)
        value = getattr(published, field) if fixed is None else fixed
        return int(min(value, _LIMITS[field]))

    prefill_tokens, length = overrides.max_prefill_tokens_per_step, chosen("draft_length")
    if length == 0:
        return StepPolicy(published.version, 0, 0, 0, 0, 0, 0, prefill_tokens)
    draft_ahead = min(chosen("draft_ahead"), limits.MAX_DRAFT_LENGTH - length)
    max_nodes_per_sequence = max(chosen("max_nodes_per_sequence"), length)
    return StepPolicy(
        published.version,
        draft_length=length,
        draft_ahead=draft_ahead,
        num_outcomes=chosen("num_outcomes") if draft_ahead else 0,
        max_nodes_per_sequence=max_nodes_per_sequence,
        max_nodes_per_step=min(
            max(published.max_nodes_per_step, max_nodes_per_sequence), limits.MAX_STEP_NODES
        ),
        wait_budget_us=chosen("wait_budget_us"),
        max_prefill_tokens_per_step=prefill_tokens,
    )
