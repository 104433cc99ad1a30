"""Domain errors to gRPC statuses and back.

Responsible for: the server interceptor that turns a PacelineError raised by any handler into a status with
google.rpc details, and `from_rpc_error`, its inverse on the client's side. Errors without a meaning for the
caller become INTERNAL with an id that stands in the log beside the traceback; no traceback leaves the
process.

Deliberately does not know: any service. Called by services.runtime.lifecycle (server) and by callers of other
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from paceline.contract import errors

ERROR_DOMAIN = "paceline"
RETRY_AFTER_S = 1.0
"""What RetryInfo says on overload; clients add jitter."""

_DETAILS_KEY = "grpc-status-details-bin"

_log = structlog.get_logger()


def status_code(error: errors.PacelineError) -> grpc.StatusCode:
    """The gRPC status of a domain error."""
    return grpc.StatusCode[error.status]


def to_status(error: errors.PacelineError) -> status_pb2.Status:
    """The google.rpc.Status of a domain error: ErrorInfo, and BadRequest or RetryInfo where they apply."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)]
    if isinstance(error, errors.InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.description
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.CapacityError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(RETRY_AFTER_S * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    number: int = status_code(error).value[0]
    return status_pb2.Status(code=number, message=str(error), details=packed)


def internal_error(error_id: str) -> errors.PacelineError:
    """What a caller learns of an unexpected exception."""
    return errors.PacelineError(f"internal error {error_id}")


def from_rpc_error(error: aio.AioRpcError) -> errors.PacelineError:
    """The domain error behind a failed call, for callers that act on it or pass it on.

    The ErrorInfo reason decides; a status without one (made by gRPC itself, such as a refused connection) is
    mapped by its code. ``__cause__`` is the rpc error.
    """
    message = error.details() or error.code().name
    status = status_pb2.Status()
    trailers: Any = error.trailing_metadata() or ()  # pairs at run time; the stubs know no iteration
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except ValueError:  # a broken trailer: the code still tells
                status.Clear()
    reason, violation = None, None
    for detail in status.details:
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            reason = info.reason if info.domain == ERROR_DOMAIN else None
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
            violation = next(iter(bad_request.field_violations), None)
    domain_error = _rebuild(error.code(), reason, violation, message)
    domain_error.__cause__ = error
    return domain_error


def _rebuild(
    code: grpc.StatusCode,
    reason: str | None,
    violation: error_details_pb2.BadRequest.FieldViolation | None,
    message: str,
) -> errors.PacelineError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        if violation is not None:
            return errors.InvalidRequestError(violation.field, violation.description)
        return errors.InvalidRequestError("request", message)
    candidates = [kind for kind in _known_errors() if kind.status == code.name]
    for kind in candidates:
        if kind.reason == reason:
            return kind(message)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return errors.UnavailableError(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.CapacityError(message)
    rebuilt = errors.PacelineError(message)
    rebuilt.status = code.name
    rebuilt.reason = reason or rebuilt.reason
    return rebuilt


def _known_errors() -> list[type[errors.PacelineError]]:
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    return [
        kind
        for kind in kinds
        if issubclass(kind, errors.PacelineError) and not issubclass(kind, errors.InvalidRequestError)
    ]


class ErrorInterceptor(aio.ServerInterceptor):
    """Maps what handlers raise to statuses, for all four kinds of method, and counts calls under way.

    Args:
        refuse: asked before each call with the method's full name; an error it returns ends the call.
        is_counted: whether a method counts as work that a drain waits for.
    """

    def __init__(
        self,
        refuse: Callable[[str], errors.PacelineError | None] = lambda _method: None,
        is_counted: Callable[[str], bool] = lambda _method: True,
    ) -> None:
        self._refuse = refuse
        self._is_counted = is_counted
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no counted call is under way."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one call."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # an unknown method; gRPC answers UNIMPLEMENTED
            return handler
        method: str = handler_call_details.method
        streams_in, streams_out = handler.request_streaming, handler.response_streaming
        kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
        inner = getattr(handler, kind)
        if inspect.isasyncgenfunction(inner):
            wrapped: Callable[..., Any] = self._wrap_generator(inner, method)
        elif inspect.iscoroutinefunction(inner):
            wrapped = self._wrap_coroutine(inner, method)
        else:  # a synchronous handler runs on gRPC's threads and is not ours
            return handler
        factory = getattr(grpc, f"{kind}_rpc_method_handler")
        return factory(wrapped, handler.request_deserializer, handler.response_serializer)

    def _wrap_coroutine(
        self, inner: Callable[..., Awaitable[Any]], method: str
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            with self._counting(method):
                try:
                    self._check(method)
                    return await inner(request, context)
                except Exception as error:
                    await _abort(context, method, error)

        return call

    def _wrap_generator(
        self, inner: Callable[..., AsyncIterator[Any]], method: str
    ) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            with self._counting(method):
                try:
                    self._check(method)
                    responses = inner(request, context)
                    try:
                        async for response in responses:
                            yield response
                    finally:  # the handler's own finally blocks run now, not when the collector gets there
                        await responses.aclose()  # type: ignore[attr-defined]
                except Exception as error:
                    await _abort(context, method, error)

        return call

    @contextlib.contextmanager
    def _counting(self, method: str) -> Iterator[None]:
        if not self._is_counted(method):
            yield
            return
        self._num_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()

    def _check(self, method: str) -> None:
        error = self._refuse(method)
        if error is not None:
            raise error


async def _abort(context: aio.ServicerContext[Any, Any], method: str, error: Exception) -> NoReturn:
    if isinstance(error, aio.AbortError):
        raise error
    if isinstance(error, aio.AioRpcError):
        error = from_rpc_error(error)
    if not isinstance(error, errors.PacelineError):
        error_id = uuid.uuid4().hex[:16]
        _log.error("handler failed", method=method, error_id=error_id, exc_info=error)
        error = internal_error(error_id)
    status = to_status(error)
    await context.abort(
        status_code(error), status.message, trailing_metadata=((_DETAILS_KEY, status.SerializeToString()),)
    )
    raise AssertionError("abort returned")
