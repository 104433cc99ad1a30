"""Errors as google.rpc messages in a call's trailing metadata, written by servers and read by every client.

Responsible for: the reason, the violated field and the retry delay. Deliberately does not know: gRPC, which error a
reader makes of them. Called by services.runtime.error_mapping and paceline.client.failed_call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from paceline.contract.errors import CapacityError, InvalidRequestError, PacelineError
from paceline.contract.failures import StatusCode

KEY = "grpc-status-details-bin"
"""Metadata key that gRPC reserves for a google.rpc.Status."""
DOMAIN = "paceline"
RETRY_AFTER_S = 1.0
"""Retry delay on overload; clients add jitter."""


class ErrorDetails(NamedTuple):
    """What a server says of an error beside its status code; None for each that it does not say.

    Attributes:
        reason: `PacelineError.reason`.
        violation: the first violated field.
        retry_after_s: the pause that the server asks for.
    """

    reason: str | None = None
    violation: InvalidRequestError | None = None
    retry_after_s: float | None = None


def to_status(error: PacelineError) -> status_pb2.Status:
    """The google.rpc.Status of an error: ErrorInfo, and BadRequest or RetryInfo where they apply."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.description
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, CapacityError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(RETRY_AFTER_S * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in details]
    for holder, detail in zip(packed, details, strict=True):
        holder.Pack(detail)
    return status_pb2.Status(code=StatusCode[error.status], message=str(error), details=packed)


def read_details(trailing_metadata: Iterable[tuple[str, Any]] | None) -> ErrorDetails:
    """The details in a failed call's trailing metadata. Metadata that cannot be read says nothing."""
    status = status_pb2.Status()
    for key, value in trailing_metadata or ():
        if key == KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except ValueError:  # a proxy may write this entry; the status code is still valid
                status.Clear()
    found = ErrorDetails()
    for detail in status.details:
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            found = found._replace(reason=info.reason if info.domain == DOMAIN else None)
        elif detail.Unpack(bad_request):
            for field in bad_request.field_violations[:1]:
                found = found._replace(violation=InvalidRequestError(field.field, field.description))
        elif detail.Unpack(retry):
            pause_s = max(0.0, retry.retry_delay.ToTimedelta().total_seconds())
            found = found._replace(retry_after_s=pause_s)
    return found
