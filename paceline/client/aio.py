"""The asynchronous client.

Responsible for: calls, deadlines, retries before the first token, cancellation, on asyncio. Deliberately does
not know: threads, the content of requests and events. Its synchronous twin is :mod:`paceline.client.blocking`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any

from grpc import aio

from paceline.client.blocking import DEFAULT_ENDPOINT, DEFAULT_TIMEOUT_S
from paceline.client.channel import OPTIONS, TlsFiles
from paceline.client.events import Completion, Event, ModelInfo
from paceline.client.failed_call import ServerError, from_failed_call
from paceline.client.order import EventOrder
from paceline.client.requests import Prompt, build_request, check_single, for_completion
from paceline.client.retry import RetryPolicy
from paceline.contract.errors import PacelineError
from paceline.v1 import generation_pb2, generation_pb2_grpc


class AsyncPacelineClient:
    """Generates text at a gateway, within one event loop.

    Close it, or use it as an asynchronous context manager.

    Args:
        endpoint: host:port of the gateway.
        timeout_s: default deadline of a call, retries included.
        retry: when and how often a call is retried.
        tls: credentials; None for a connection without TLS.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        if tls is None:
            self._channel = aio.insecure_channel(endpoint, options=OPTIONS)
        else:
            self._channel = aio.secure_channel(endpoint, tls.credentials(), options=OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> AsyncPacelineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels running calls and closes the channel."""
        await self._channel.close(None)

    async def model_info(self, timeout_s: float = 5.0) -> ModelInfo:
        """The served model.

        Raises:
            PacelineError: the gateway does not answer.
        """
        try:
            answer = await self._stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=timeout_s)
        except aio.AioRpcError as error:
            raise from_failed_call(error) from error
        return ModelInfo.from_proto(answer)

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **parameters: Any
    ) -> AsyncGenerator[Event, None]:
        """Streams a completion: one Started, Chunks, one Finished; with ``n`` choices, each of these n times.

        If the prompt's log-probabilities are requested, they precede the first Chunk. Closing the iterator
        (``aclose``, or leaving an ``aclosing`` block) cancels the generation, and so does cancelling the task
        that reads it.

        Args:
            prompt: a text, a conversation or token ids.
            timeout_s: deadline of the whole generation.
            **parameters: see :func:`paceline.client.requests.build_request`.

        Raises:
            InvalidRequestError: names the field.
            CapacityError, UnavailableError: after all attempts, or at once if an event has been returned
                already.
            DeadlineError: the deadline passed.
        """
        request = build_request(prompt, **parameters)
        return self._stream(request, time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s))

    async def complete(
        self, prompt: Prompt, *, timeout_s: float | None = None, **parameters: Any
    ) -> Completion:
        """Waits for a whole completion; arguments and errors as for :meth:`generate`, without ``n``."""
        check_single(parameters)
        async with aclosing(
            self.generate(prompt, timeout_s=timeout_s, **for_completion(parameters))
        ) as events:
            return Completion.from_events([event async for event in events])

    async def complete_many(
        self, prompt: Prompt, n: int, *, timeout_s: float | None = None, **parameters: Any
    ) -> list[Completion]:
        """Waits for n completions of one prompt, 1 to 16; arguments and errors as for :meth:`generate`.

        The completion at index i has the seed plus i. A single request with that seed gives the same text.
        """
        async with aclosing(
            self.generate(prompt, timeout_s=timeout_s, n=n, **for_completion(parameters))
        ) as events:
            return Completion.many_from_events([event async for event in events])

    async def _stream(
        self, request: generation_pb2.GenerateRequest, deadline: float
    ) -> AsyncGenerator[Event, None]:
        num_attempts = 0
        while True:
            num_attempts += 1
            is_shown = False
            try:
                async with aclosing(self._attempt(request, deadline)) as events:
                    async for event in events:
                        is_shown = True
                        yield event
                return
            except PacelineError as error:
                remaining_s = deadline - time.monotonic()
                pause_s = self._retry.pause_s(error, num_attempts, remaining_s, random.uniform)
                if is_shown or pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def _attempt(
        self, request: generation_pb2.GenerateRequest, deadline: float
    ) -> AsyncGenerator[Event, None]:
        """One call. The started event is returned with the next event: a call that fails before it returns
        nothing.
        """
        call = self._stub.Generate(request, timeout=max(0.001, deadline - time.monotonic()))
        order = EventOrder(request.n if request.HasField("n") else 1)
        try:
            async for response in call:
                for event in order.push(response):
                    yield event
                if order.is_over:
                    return
            raise ServerError("the stream ended without a finished event")
        except aio.AioRpcError as error:
            raise from_failed_call(error) from error
        finally:
            call.cancel()
