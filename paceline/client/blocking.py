"""The synchronous client.

Responsible for: calls, deadlines, retries before the first token, cancellation. Deliberately does not know:
asyncio, the content of requests and events. Its asynchronous twin is :mod:`paceline.client.aio`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator
from types import TracebackType
from typing import Any

import grpc

from paceline.client.channel import OPTIONS, TlsFiles
from paceline.client.events import Completion, Event, ModelInfo
from paceline.client.failed_call import ServerError, from_failed_call
from paceline.client.order import EventOrder
from paceline.client.requests import Prompt, build_request, check_single, for_completion
from paceline.client.retry import RetryPolicy
from paceline.contract.errors import PacelineError
from paceline.v1 import generation_pb2, generation_pb2_grpc

DEFAULT_ENDPOINT = "127.0.0.1:50050"
DEFAULT_TIMEOUT_S = 300.0


class PacelineClient:
    """Generates text at a gateway.

    Safe to use from several threads. Close it, or use it as a context manager.

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
            self._channel = grpc.insecure_channel(endpoint, options=OPTIONS)
        else:
            self._channel = grpc.secure_channel(endpoint, tls.credentials(), options=OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def __enter__(self) -> PacelineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels running calls and closes the channel."""
        self._channel.close()

    def model_info(self, timeout_s: float = 5.0) -> ModelInfo:
        """The served model.

        Raises:
            PacelineError: the gateway does not answer.
        """
        try:
            answer = self._stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_failed_call(error) from error
        return ModelInfo.from_proto(answer)

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **parameters: Any
    ) -> Generator[Event, None, None]:
        """Streams a completion: one Started, Chunks, one Finished; with ``n`` choices, each of these n times.

        If the prompt's log-probabilities are requested, they precede the first Chunk. Closing the iterator
        (also by garbage collection) cancels the generation.

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

    def complete(self, prompt: Prompt, *, timeout_s: float | None = None, **parameters: Any) -> Completion:
        """Waits for a whole completion; arguments and errors as for :meth:`generate`, without ``n``."""
        check_single(parameters)
        return Completion.from_events(
            self.generate(prompt, timeout_s=timeout_s, **for_completion(parameters))
        )

    def complete_many(
        self, prompt: Prompt, n: int, *, timeout_s: float | None = None, **parameters: Any
    ) -> list[Completion]:
        """Waits for n completions of one prompt, 1 to 16; arguments and errors as for :meth:`generate`.

        The completion at index i has the seed plus i. A single request with that seed gives the same text.
        """
        return Completion.many_from_events(
            self.generate(prompt, timeout_s=timeout_s, n=n, **for_completion(parameters))
        )

    def _stream(
        self, request: generation_pb2.GenerateRequest, deadline: float
    ) -> Generator[Event, None, None]:
        num_attempts = 0
        while True:
            num_attempts += 1
            is_shown = False
            try:
                for event in self._attempt(request, deadline):
                    is_shown = True
                    yield event
                return
            except PacelineError as error:
                remaining_s = deadline - time.monotonic()
                pause_s = self._retry.pause_s(error, num_attempts, remaining_s, random.uniform)
                if is_shown or pause_s is None:
                    raise
            time.sleep(pause_s)

    def _attempt(
        self, request: generation_pb2.GenerateRequest, deadline: float
    ) -> Generator[Event, None, None]:
        """One call. The started event is returned with the next event: a call that fails before it returns
        nothing.
        """
        call = self._stub.Generate(request, timeout=max(0.001, deadline - time.monotonic()))
        order = EventOrder(request.n if request.HasField("n") else 1)
        try:
            for response in call:
                yield from order.push(response)
                if order.is_over:
                    return
            raise ServerError("the stream ended without a finished event")
        except grpc.RpcError as error:
            raise from_failed_call(error) from error
        finally:
            call.cancel()
