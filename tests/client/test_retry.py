"""When a client tries again."""

from __future__ import annotations

import pytest

from paceline.client.failed_call import OverloadedError, ServerError
from paceline.client.retry import RetryPolicy
from paceline.contract.errors import (
    DeadlineError,
    DrainingError,
    InvalidRequestError,
    PacelineError,
    UnavailableError,
)

POLICY = RetryPolicy(max_attempts=3, base_s=1.0, cap_s=3.0)


def highest(low: float, high: float) -> float:
    assert low == 0.0
    return high


@pytest.mark.parametrize("error", [UnavailableError("x"), DrainingError("x"), OverloadedError("x", None)])
def test_faults_that_pass_are_tried_again_with_growing_pauses(error: PacelineError) -> None:
    pauses = [POLICY.pause_s(error, attempt, 100.0, highest) for attempt in (1, 2, 3)]
    assert pauses == [1.0, 2.0, None]


@pytest.mark.parametrize(
    "error", [InvalidRequestError("f", "x"), DeadlineError("x"), ServerError("x"), PacelineError("x")]
)
def test_others_are_not(error: PacelineError) -> None:
    assert POLICY.pause_s(error, 1, 100.0, highest) is None


def test_full_jitter_draws_from_zero() -> None:
    assert POLICY.pause_s(UnavailableError("x"), 1, 100.0, lambda low, _high: low) == 0.0


def test_the_cap_holds() -> None:
    assert RetryPolicy(10, 1.0, 3.0).pause_s(UnavailableError("x"), 8, 100.0, highest) == 3.0


def test_the_servers_own_pause_comes_first() -> None:
    assert POLICY.pause_s(OverloadedError("x", 0.5), 1, 100.0, highest) == 1.5


def test_no_pause_longer_than_the_deadline() -> None:
    assert POLICY.pause_s(UnavailableError("x"), 2, 1.9, highest) is None
