"""From a failed call to a typed error that a caller can act on.

Responsible for: reading status and google.rpc details. Deliberately does not know: retries, requests. Called by
the two clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import grpc
from google.rpc import error_details_pb2, status_pb2

from paceline.contract import errors
from paceline.contract.errors import CapacityError, PacelineError

_DETAILS_KEY = "grpc-status-details-bin"


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
    reason, violation, retry_after_s = _read_details(call.trailing_metadata())
    error: PacelineError
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        if violation is None:
            return errors.InvalidRequestError("request", message)
        return errors.InvalidRequestError(violation.field, violation.description)
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


def _read_details(
    trailers: Iterable[tuple[str, Any]] | None,
) -> tuple[str | None, error_details_pb2.BadRequest.FieldViolation | None, float | None]:
    """Reason, first field violation and retry delay; None for each that the server did not send."""
    status = status_pb2.Status()
    for key, value in trailers or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except ValueError:  # a proxy may write this trailer; the status code is still valid
                status.Clear()
    reason, violation, retry_after_s = None, None, None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request):
            violation = next(iter(bad_request.field_violations), None)
        elif detail.Unpack(retry):
            retry_after_s = max(0.0, retry.retry_delay.ToTimedelta().total_seconds())
    return reason, violation, retry_after_s
