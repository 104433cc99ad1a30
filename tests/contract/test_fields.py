"""Field checks name the very value that is wrong, and policies from other processes are checked or bounded."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.contract import fields, limits
from paceline.contract.errors import InvalidRequestError
from paceline.contract.policy import PolicyOverrides, SpeculationPolicy, StepPolicy, step_policy
from paceline.v1 import peer_pb2, scheduler_pb2


@pytest.mark.parametrize(
    ("check", "named"),
    [
        (lambda: fields.check_number("f", math.nan, 0, 1), "f"),
        (lambda: fields.check_number("f", True, 0, 1), "f"),
        (lambda: fields.check_number("f", 0.0, 0, 1, is_low_allowed=False), "f"),
        (lambda: fields.check_integer("f", 1.0, 0, 1), "f"),
        (lambda: fields.check_prompt("f", [], 10, 4), "f"),
        (lambda: fields.check_prompt("f", [1, 2, 3, 4], 10, 4), "f"),
        (lambda: fields.check_prompt("f", [1, 10, 11], 10, 4), "f[1]"),
        (lambda: fields.check_stop_token_ids("f", [1] * (limits.MAX_STOP_TOKENS + 1), 10), "f"),
        (lambda: fields.check_stop_token_ids("f", [1, 2, 10], 10), "f[2]"),
        (lambda: fields.check_new_tokens(0, 0, 3, 10), "max_new_tokens"),
        (lambda: fields.check_new_tokens(11, 0, 3, 10), "max_new_tokens"),
        (lambda: fields.check_new_tokens(4, 3, 3, 10), "num_resumed_tokens"),
        (lambda: fields.check_new_tokens(2, 2, 3, 10), "num_resumed_tokens"),
        (lambda: fields.check_log_prob_counts(8, 0, 7), "log_probs.num_top"),
        (lambda: fields.check_tenant("f", "two words"), "f"),
        (lambda: fields.check_length("f", "", 1, 4), "f"),
    ],
)
def test_a_wrong_value_is_refused_by_name(check: Callable[[], object], named: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check()
    assert refused.value.field == named


@pytest.mark.parametrize(
    ("is_wanted", "has_tap", "is_optional", "reads"),
    [
        (None, True, False, True),
        (None, False, False, False),
        (True, True, False, True),
        (True, False, False, None),
        (False, True, True, False),
        (False, True, False, None),
        (False, False, False, False),
    ],
)
def test_features_are_read_as_the_request_and_the_drafter_allow(
    is_wanted: bool | None, has_tap: bool, is_optional: bool, reads: bool | None
) -> None:
    can = fields.can_use_features(is_wanted, has_tap=has_tap, is_tap_optional=is_optional)
    assert can is (reads is not None)
    if reads is None:
        with pytest.raises(InvalidRequestError, match="reads_features"):
            fields.check_reads_features(is_wanted, has_tap=has_tap, is_tap_optional=is_optional, drafter="d")
    else:
        found = fields.check_reads_features(
            is_wanted, has_tap=has_tap, is_tap_optional=is_optional, drafter="d"
        )
        assert found is reads


@pytest.mark.parametrize(
    "field", [field.name for field in peer_pb2.StepPolicy.DESCRIPTOR.fields if field.name != "version"]
)
def test_a_step_policy_out_of_range_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        StepPolicy.from_proto(peer_pb2.StepPolicy(**{field: 2**32 - 1}))
    assert refused.value.field == f"policy.{field}"


@given(st.data())
def test_whatever_is_published_makes_a_policy_that_every_process_takes(data: st.DataObject) -> None:
    numbers = st.integers(0, 2**32 - 1)
    message = scheduler_pb2.SpeculationPolicy(
        version=data.draw(st.integers(0, 2**64 - 1)),
        draft_length=data.draw(numbers),
        max_nodes_per_sequence=data.draw(numbers),
        max_nodes_per_step=data.draw(numbers),
        wait_budget_us=data.draw(numbers),
        draft_ahead=data.draw(numbers),
        num_outcomes=data.draw(numbers),
        expected_speedup=data.draw(st.floats()),
    )
    step = step_policy(SpeculationPolicy.from_proto(message), PolicyOverrides())
    assert StepPolicy.from_proto(step.to_proto()) == step
    assert step.draft_length + step.draft_ahead <= limits.MAX_DRAFT_LENGTH
    assert step.draft_length <= step.max_nodes_per_sequence <= step.max_nodes_per_step
    if not step.draft_length:
        assert not any((step.is_drafting, step.draft_ahead, step.num_outcomes, step.wait_budget_us))
