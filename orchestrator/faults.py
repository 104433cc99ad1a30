"""Failures that peers report, and what they mean for a request.

Responsible for: which failures are worth another attempt, and the error a caller sees otherwise. Deliberately does
not know state. Used by orchestrator.cycles and orchestrator.draft_dispatcher.
"""

from __future__ import annotations

import grpc

from paceline.contract.errors import CapacityError, InvalidRequestError, PacelineError, UnavailableError
from paceline.v1 import peer_pb2


def _number(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number


RESOURCE_EXHAUSTED = _number(grpc.StatusCode.RESOURCE_EXHAUSTED)
INVALID_ARGUMENT = _number(grpc.StatusCode.INVALID_ARGUMENT)
UNAVAILABLE = _number(grpc.StatusCode.UNAVAILABLE)

RETRIABLE_CODES = frozenset(
    _number(code)
    for code in (
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    )
)
"""Failures of a sequence that opening it again may cure."""

RETRY_DELAY_S = 0.1
"""Pause before the first further attempt; it doubles."""

OUT_OF_POSITIONS = "OUT_OF_POSITIONS"
"""The drafter's reason for a sequence that has outgrown it; the text goes on without it."""

DRAFTING_ENDS = frozenset({OUT_OF_POSITIONS, "INCOMPATIBLE_PEER", "INVALID_TOKENS", "INVALID_FIELD"})
"""Reasons of a drafter that opening the sequence again would not cure."""


def error_of(failure: peer_pb2.SequenceFailure) -> PacelineError:
    """The error that a caller of Run sees for a failure at the verifier."""
    message = f"{failure.reason}: {failure.message}"
    if failure.code == RESOURCE_EXHAUSTED:
        return CapacityError(message)
    if failure.code == INVALID_ARGUMENT:
        field, _, description = failure.message.partition(": ")
        return InvalidRequestError(field or "request", description or failure.message)
    if failure.code == UNAVAILABLE:
        return UnavailableError(message)
    return PacelineError(message)
