"""The policy that the step loop obeys. Knows nothing of where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.contract.errors import InvalidRequestError
from paceline.v1 import target_pb2

MAX_NODES = 1024
MAX_WAIT_BUDGET_US = 1_000_000
MAX_PREFILL_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """What the scheduler decided. The defaults serve until it has decided anything.

    Attributes:
        max_nodes_per_step: draft nodes over all sequences of one step.
        max_nodes_per_sequence: draft nodes of one sequence in one step.
        wait_budget_us: longest a step is held for drafts that are due, in microseconds.
        max_prefill_tokens: prompt tokens in one step.
        colocated_draft_length: tokens a drafter in this process drafts; 0 turns it off.
    """

    version: int = 0
    max_nodes_per_step: int = 64
    max_nodes_per_sequence: int = 8
    wait_budget_us: int = 0
    max_prefill_tokens: int = 512
    colocated_draft_length: int = 4

    @property
    def is_drafting(self) -> bool:
        """Whether drafts are verified at all."""
        return self.max_nodes_per_sequence > 0

    @classmethod
    def from_proto(cls, policy: target_pb2.VerifyPolicy) -> StepPolicy:
        """Check a policy from the wire.

        Raises:
            InvalidRequestError: a value is outside its range.
        """
        for name, limit in (
            ("max_nodes_per_step", MAX_NODES),
            ("max_nodes_per_sequence", MAX_NODES),
            ("wait_budget_us", MAX_WAIT_BUDGET_US),
            ("max_prefill_tokens_per_step", MAX_PREFILL_TOKENS),
            ("colocated_draft_length", 64),
        ):
            if getattr(policy, name) > limit:
                raise InvalidRequestError(f"policy.{name}", f"must be at most {limit}")
        return cls(
            version=policy.version,
            max_nodes_per_step=policy.max_nodes_per_step,
            max_nodes_per_sequence=policy.max_nodes_per_sequence,
            wait_budget_us=policy.wait_budget_us,
            max_prefill_tokens=policy.max_prefill_tokens_per_step or cls().max_prefill_tokens,
            colocated_draft_length=policy.colocated_draft_length,
        )
