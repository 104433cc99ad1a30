"""From the scheduler's policy to what verifier and drafter are told.

Responsible for: the policy in force (the last one stays, whatever becomes of the scheduler), operator overrides,
and the translation. Deliberately does not know streams. Used by orchestrator.cycles; fed by
orchestrator.policy_watch.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1 import drafter_pb2, scheduler_pb2, target_pb2

MAX_DRAFT_LENGTH = 64
MAX_WAIT_BUDGET_US = 1_000_000
DEFAULT_DRAFT_LENGTH = 4
MAX_NODES_PER_STEP = 1024
"""More than that a verifier refuses, and with it the whole policy."""


@dataclass(frozen=True, slots=True)
class PolicyOverrides:
    """What the operator fixed by flag; None leaves it to the policy.

    Attributes:
        draft_length: tokens per draft.
        draft_ahead: tokens to go on drafting while the target verifies.
        wait_budget_us: longest draft wait of a step.
        max_nodes: draft nodes of one sequence in one step.
        outcomes: outcomes of a step to draft past while the target verifies.
        max_prefill_tokens_per_step: prompt rows per step; the scheduler does not decide this one.
    """

    draft_length: int | None = None
    draft_ahead: int | None = None
    wait_budget_us: int | None = None
    max_prefill_tokens_per_step: int = 256
    max_nodes: int | None = None
    outcomes: int | None = None


def default_policy() -> scheduler_pb2.SpeculationPolicy:
    """The policy before, or without, a scheduler."""
    return scheduler_pb2.SpeculationPolicy(
        version=0,
        draft_length=DEFAULT_DRAFT_LENGTH,
        max_nodes_per_sequence=2 * DEFAULT_DRAFT_LENGTH,
        max_nodes_per_step=64,
        wait_budget_us=20_000,
        draft_ahead=DEFAULT_DRAFT_LENGTH,
        reason="default: no scheduler has decided yet",
    )


class PolicyInForce:
    """The last policy that arrived, with the operator's overrides on top."""

    def __init__(self, overrides: PolicyOverrides) -> None:
        self._overrides = overrides
        self._policy = default_policy()

    @property
    def policy(self) -> scheduler_pb2.SpeculationPolicy:
        """The scheduler's policy, without overrides."""
        return self._policy

    def accept(self, policy: scheduler_pb2.SpeculationPolicy) -> None:
        """Puts a policy in force. A restarted scheduler counts versions anew, so any version is taken."""
        self._policy = policy

    @property
    def draft_length(self) -> int:
        """Tokens per draft, within what the frames allow."""
        fixed = self._overrides.draft_length
        return min(self._policy.draft_length if fixed is None else fixed, MAX_DRAFT_LENGTH)

    @property
    def draft_ahead(self) -> int:
        """Tokens drafted ahead; none where drafting is off."""
        fixed = self._overrides.draft_ahead
        ahead = self._policy.draft_ahead if fixed is None else fixed
        return min(ahead, MAX_DRAFT_LENGTH - self.draft_length) if self.draft_length else 0

    @property
    def outcomes(self) -> int:
        """Outcomes drafted past; none where nothing is drafted ahead."""
        fixed = self._overrides.outcomes
        wanted = self._policy.outcomes if fixed is None else fixed
        return min(wanted, MAX_DRAFT_LENGTH) if self.draft_ahead else 0

    @property
    def max_nodes(self) -> int:
        """Draft nodes of one sequence in one step: at least its chain, more for a tree."""
        length, fixed = self.draft_length, self._overrides.max_nodes
        wanted = self._policy.max_nodes_per_sequence if fixed is None else fixed
        return min(max(wanted, length), MAX_DRAFT_LENGTH) if length else 0

    def verify_policy(self, *, is_colocated: bool, is_drafter_due: bool) -> target_pb2.VerifyPolicy:
        """What the verifier is told.

        Args:
            is_colocated: the verifier hosts the drafter itself.
            is_drafter_due: drafts can be expected to arrive; otherwise no step is held for them.
        """
        policy, length = self._policy, self.draft_length
        fixed_wait = self._overrides.wait_budget_us
        wait_budget_us = policy.wait_budget_us if fixed_wait is None else fixed_wait
        per_sequence = self.max_nodes
        return target_pb2.VerifyPolicy(
            version=policy.version,
            max_nodes_per_step=min(max(policy.max_nodes_per_step, per_sequence), MAX_NODES_PER_STEP)
            if length
            else 0,
            max_nodes_per_sequence=per_sequence,
            wait_budget_us=min(wait_budget_us, MAX_WAIT_BUDGET_US) if length and is_drafter_due else 0,
            max_prefill_tokens_per_step=self._overrides.max_prefill_tokens_per_step,
            colocated_draft_length=length if is_colocated else 0,
        )

    def draft_plan(self) -> drafter_pb2.DraftPlan:
        """What the drafters are told."""
        return drafter_pb2.DraftPlan(
            version=self._policy.version,
            draft_length=self.draft_length,
            draft_ahead=self.draft_ahead,
            max_nodes=self.max_nodes,
            outcomes=self.outcomes,
        )
