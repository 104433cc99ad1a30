"""From a failed call to a typed error that a caller can act on.

Responsible for: the error that a status and its details mean. Deliberately does not know: retries, requests. Called by
the two clients.
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from paceline.contract import errors
from paceline.contract.error_details import read_details
from paceline.contract.errors import CapacityError, PacelineError


class ServerError(PacelineError):
    """Any other error of the server; see `status` and `reason`."""

    status = "UNKNOWN"
    reason = "UNKNOWN"


class OverloadedError(CapacityError):
    """The server has no capacity now.

    Attributes:
        retry_after_s: the pause that the server asks for; None if it names none.
    """

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class FailedCall(Protocol):
    """The common interface of grpc's and grpc.aio's errors."""

    def code(self) -> grpc.StatusCode:
        """Status."""
        ...

    def details(self) -> str | None:
        """Message for people."""
        ...

    def trailing_metadata(self) -> Any:
        """Pairs of key and value, or None."""
        ...


def from_failed_call(call: FailedCall) -> PacelineError:
    """The typed error of a failed call.

    An InvalidRequestError names the field, an OverloadedError the pause that the server asks for.
    """
    code, message = call.code(), call.details() or call.code().name
    reason, violation, retry_after_s = read_details(call.trailing_metadata())
    error: PacelineError
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return violation or errors.InvalidRequestError("request", message)
    if code is grpc.StatusCode.UNAVAILABLE:
        is_draining = reason == errors.DrainingError.reason
        error = errors.DrainingError(message) if is_draining else errors.UnavailableError(message)
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        error = OverloadedError(message, retry_after_s)
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        error = errors.DeadlineError(message)
    elif code is grpc.StatusCode.FAILED_PRECONDITION and reason == errors.IncompatiblePeerError.reason:
        error = errors.IncompatiblePeerError(message)
    else:
        error = ServerError(message)
        error.status = code.name
        error.reason = reason or code.name
    return error
