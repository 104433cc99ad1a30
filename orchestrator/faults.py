"""What the failures that peers report mean for a request.

Responsible for: the pause before another attempt, and the error that a caller of Run sees. Deliberately does not know
state. Used by orchestrator.cycles and orchestrator.draft_dispatcher.
"""

from __future__ import annotations

from paceline.contract.errors import CapacityError, InvalidRequestError, PacelineError, UnavailableError
from paceline.contract.failures import StatusCode
from paceline.v1 import peer_pb2

RETRY_DELAY_S = 0.1
"""Pause before the first further attempt; each further pause is twice as long."""


def error_of(failure: peer_pb2.SequenceFailure) -> PacelineError:
    """The error that a caller of Run sees for a failure at the verifier."""
    message = f"{failure.reason}: {failure.message}"
    match failure.code:
        case StatusCode.RESOURCE_EXHAUSTED:
            return CapacityError(message)
        case StatusCode.INVALID_ARGUMENT:
            field, _, description = failure.message.partition(": ")
            return InvalidRequestError(field or "request", description or failure.message)
        case StatusCode.UNAVAILABLE:
            return UnavailableError(message)
        case _:
            return PacelineError(message)
