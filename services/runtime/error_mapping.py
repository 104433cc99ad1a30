"""Errors to gRPC statuses, and failed calls back to errors.

Responsible for: the server interceptor that turns a PacelineError of any handler into a status with google.rpc
details, and `from_rpc_error`, its inverse for callers of other processes. An error without a meaning for the caller
becomes INTERNAL with an id; the log has the same id beside the traceback. No traceback leaves the process.

Deliberately does not know: any service. Called by services.runtime.process and by callers of other processes.
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
from grpc import aio

from paceline.contract import error_details, errors

_log = structlog.get_logger()


def status_code(error: errors.PacelineError) -> grpc.StatusCode:
    """The gRPC status of an error."""
    return grpc.StatusCode[error.status]


def internal_error(error_id: str) -> errors.PacelineError:
    """What a caller learns of an unexpected exception."""
    return errors.PacelineError(f"internal error {error_id}")


def from_rpc_error(error: aio.AioRpcError) -> errors.PacelineError:
    """The error behind a failed call, for callers that act on it or pass it on. Its ``__cause__`` is the rpc error.

    The reason decides. A status without one was made by gRPC itself, such as a refused connection: its code decides.
    """
    trailing_metadata: Any = error.trailing_metadata()  # pairs at run time; the stubs do not say so
    reason, violation, _ = error_details.read_details(trailing_metadata)
    rebuilt = _rebuild(error.code(), reason, violation, error.details() or error.code().name)
    rebuilt.__cause__ = error
    return rebuilt


def _rebuild(
    code: grpc.StatusCode, reason: str | None, violation: errors.InvalidRequestError | None, message: str
) -> errors.PacelineError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return violation or errors.InvalidRequestError("request", message)
    for kind in _known_errors():
        if (kind.status, kind.reason) == (code.name, reason):
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
    """Maps the errors of handlers to statuses, for all four kinds of method, and counts the calls under way.

    Args:
        refuse: called before each call with the method's full name; an error that it returns ends the call.
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
        else:  # a synchronous handler runs on gRPC's threads; none of this project's does
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
                    finally:  # run the handler's finally blocks now, not at the next garbage collection
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
    status = error_details.to_status(error)
    await context.abort(
        status_code(error),
        status.message,
        trailing_metadata=((error_details.KEY, status.SerializeToString()),),
    )
    raise AssertionError("abort returned")
