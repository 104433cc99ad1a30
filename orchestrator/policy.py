"""The policy in force at one conductor: the last one that arrived, whatever becomes of the scheduler.

Deliberately does not know streams. Fed by orchestrator.policy_watch through orchestrator.cycles.
"""

from __future__ import annotations

from paceline.contract.policy import PolicyOverrides, SpeculationPolicy, StepPolicy, step_policy


class PolicyInForce:
    """The last published policy, with the operator's overrides on top.

    Attributes:
        published: the scheduler's policy, without overrides.
        step: what verifier and drafters are told of it.
    """

    def __init__(self, overrides: PolicyOverrides) -> None:
        self._overrides = overrides
        self.published: SpeculationPolicy
        self.step: StepPolicy
        self.accept(SpeculationPolicy.default())

    def accept(self, published: SpeculationPolicy) -> None:
        """Put a policy in force. The newest to arrive wins, whatever its version."""
        self.published = published
        self.step = step_policy(published, self._overrides)
