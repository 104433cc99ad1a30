"""The policy in force: what verifier and drafters get of the scheduler's policy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policy import PolicyInForce
from paceline.contract.policy import PolicyOverrides, SpeculationPolicy, StepPolicy
from paceline.v1 import scheduler_pb2


def test_default_policy_waits_for_drafts_only_where_they_are_due() -> None:
    policy = PolicyInForce(PolicyOverrides())
    due = policy.step.for_verifier(is_colocated=False, is_drafter_due=True)
    alone = policy.step.for_verifier(is_colocated=False, is_drafter_due=False)
    assert due.wait_budget_us > 0
    assert alone.wait_budget_us == 0
    assert due.draft_length == 0
    assert policy.step.draft_length == 4


def test_overrides_stand_above_the_policy() -> None:
    policy = PolicyInForce(PolicyOverrides(draft_length=6, draft_ahead=1, wait_budget_us=7))
    policy.accept(
        SpeculationPolicy.from_proto(
            scheduler_pb2.SpeculationPolicy(
                version=3, draft_length=2, wait_budget_us=900, max_nodes_per_sequence=2
            )
        )
    )
    verify = policy.step.for_verifier(is_colocated=True, is_drafter_due=True)
    assert (verify.version, verify.wait_budget_us, verify.draft_length) == (3, 7, 6)
    assert verify.max_nodes_per_sequence == 6
    assert verify.max_nodes_per_step == 6
    plan = policy.step
    assert (plan.version, plan.draft_length, plan.draft_ahead) == (3, 6, 1)


def test_policy_of_length_zero_turns_everything_off() -> None:
    policy = PolicyInForce(PolicyOverrides())
    policy.accept(
        SpeculationPolicy.from_proto(
            scheduler_pb2.SpeculationPolicy(
                version=9, draft_length=0, wait_budget_us=900, draft_ahead=4, max_nodes_per_step=64
            )
        )
    )
    verify = policy.step.for_verifier(is_colocated=False, is_drafter_due=True)
    assert (verify.max_nodes_per_step, verify.max_nodes_per_sequence, verify.wait_budget_us) == (0, 0, 0)
    assert (policy.step.draft_length, policy.step.draft_ahead) == (0, 0)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_plan_stays_within_the_frames_limits(length: int, ahead: int) -> None:
    policy = PolicyInForce(PolicyOverrides())
    policy.accept(
        SpeculationPolicy.from_proto(scheduler_pb2.SpeculationPolicy(draft_length=length, draft_ahead=ahead))
    )
    plan = policy.step
    assert 0 <= plan.draft_length + plan.draft_ahead <= 64


@given(*(st.integers(0, 2**32 - 1) for _ in range(4)), st.booleans())
def test_no_policy_is_more_than_a_verifier_takes(
    length: int, nodes: int, per_step: int, wait_budget_us: int, is_colocated: bool
) -> None:
    """It would refuse the whole frame, and with it the stream."""
    policy = PolicyInForce(PolicyOverrides())
    policy.accept(
        SpeculationPolicy.from_proto(
            scheduler_pb2.SpeculationPolicy(
                draft_length=length,
                max_nodes_per_sequence=nodes,
                max_nodes_per_step=per_step,
                wait_budget_us=wait_budget_us,
            )
        )
    )
    sent = policy.step.for_verifier(is_colocated=is_colocated, is_drafter_due=True)
    assert StepPolicy.from_proto(sent.to_proto()).max_nodes_per_step == sent.max_nodes_per_step
