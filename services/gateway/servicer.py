"""The client-facing gRPC service: one method per rpc; the work is done by the other files of this package.

Responsible for: the order of a request's stages (check, admit, run, stream), its deadline, and cancelling the
run when the client disconnects. Deliberately does not know: how tokens are made, how errors become statuses.

Called by: gRPC; built in :mod:`services.gateway.__main__`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import structlog
from grpc import aio

from paceline.contract.errors import CapacityError, DeadlineError, PacelineError, UnavailableError
from paceline.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2
from services.gateway import metrics
from services.gateway.checked_request import CheckedRequest
from services.gateway.choices import merged
from services.gateway.director import DirectorClient
from services.gateway.generation import Generation
from services.gateway.grammar_checker import ConstraintChecker
from services.gateway.requests import RequestChecker, check_num_choices
from services.gateway.served_model import ModelWatch, ServedModel
from services.gateway.tokenizer import ModelTokenizer
from services.runtime.tenants import HEADER

# A call with less time left than this is refused.
_MIN_REMAINING_S = 0.02
# Part of the caller's time that is left for sending the answer.
_DEADLINE_MARGIN_S = 0.01
# The director replaces a conductor that fails; the run continues there from the tokens so far.
_MAX_RUNS = 3
_RESUME_PAUSE_S = 0.5


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves ``paceline.v1.GenerationService``.

    Args:
        tokenizer: of the served model.
        checker: checks requests.
        constraints: checks constraints on completions.
        watch: the served model.
        director: the orchestrator.
        max_requests: most completions in flight; further ones are refused and may be retried.
        default_timeout_s: for calls without a deadline.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        tokenizer: ModelTokenizer,
        checker: RequestChecker,
        constraints: ConstraintChecker,
        watch: ModelWatch,
        director: DirectorClient,
        max_requests: int,
        default_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._checker = checker
        self._constraints = constraints
        self._watch = watch
        self._director = director
        self._max_requests = max_requests
        self._default_timeout_s = default_timeout_s
        self._clock = clock
        self._num_running = 0
        self._log = structlog.get_logger()

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: aio.ServicerContext
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Streams the completions of one request."""
        arrived_at = self._clock()
        deadline = arrived_at + self._timeout_s(context)
        model = self._watch.current()
        num_choices = check_num_choices(request)
        if self._num_running + num_choices > self._max_requests:
            raise CapacityError(
                f"{self._num_running} completions are in flight, {self._max_requests} is the limit"
            )
        self._num_running += num_choices
        try:
            with metrics.in_flight(model.name):
                # Long prompts take tens of milliseconds. The library releases the GIL, so other streams
                # continue.
                checked = await asyncio.to_thread(self._checker.check, request, model, _tenant(context))
                await self._constraints.check(checked.sampling, model)
                choices = [
                    self._stream(checked.choice(index), index, model, arrived_at, deadline)
                    for index in range(num_choices)
                ]
                async with aclosing(merged(choices)) as events:
                    async for event in events:
                        yield event
        except PacelineError as error:
            metrics.observe_failure(model.name, error.reason)
            raise
        finally:
            self._num_running -= num_choices

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: aio.ServicerContext
    ) -> generation_pb2.GetModelInfoResponse:
        """Describes the served model."""
        model = self._watch.current()
        return generation_pb2.GetModelInfoResponse(
            model=model.name,
            model_fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
            method=model.method,
            placement=model.placement,
        )

    def _timeout_s(self, context: aio.ServicerContext) -> float:
        remaining = context.time_remaining()
        timeout_s = (
            self._default_timeout_s if remaining is None else min(remaining, self._default_timeout_s * 10)
        )
        if timeout_s < _MIN_REMAINING_S:
            raise DeadlineError("the deadline leaves no time to generate anything")
        return timeout_s - _DEADLINE_MARGIN_S

    def _remaining_s(self, deadline: float) -> float:
        remaining = deadline - self._clock()
        if remaining <= 0:
            raise DeadlineError("the deadline passed")
        return remaining

    async def _stream(
        self, request: CheckedRequest, index: int, model: ServedModel, arrived_at: float, deadline: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Admits and runs one choice. If a conductor fails or gives up, another one continues from the tokens so
        far.
        """
        generation = Generation(request, model, self._tokenizer.detokenizer(), self._clock, index)
        log = self._log
        num_runs = 0
        is_admitted = False
        try:
            while True:
                num_runs += 1
                try:
                    admitted = await self._director.admit(
                        len(request.prompt_token_ids), request.max_new_tokens, self._remaining_s(deadline)
                    )
                    if not is_admitted:
                        is_admitted = True
                        log = log.bind(request_id=admitted.request_id)
                        metrics.observe_admission(model.name, request)
                        yield generation.started(admitted.request_id)
                    run_request = request.to_run_request(admitted.request_id, generation.token_ids)
                    frames = self._director.run(
                        admitted.conductor_endpoint, run_request, self._remaining_s(deadline)
                    )
                    async with aclosing(frames):
                        async for frame in frames:
                            # The conductor's verifier has been lost for too long; another conductor has
                            # another one.
                            is_given_up = (
                                frame.finish_reason == sampling_pb2.FINISH_REASON_ERROR
                                and num_runs < _MAX_RUNS
                                and bool(generation.token_ids or frame.token_ids)
                            )
                            if is_given_up:
                                frame.finish_reason = sampling_pb2.FINISH_REASON_UNSPECIFIED
                            for event in generation.push(frame):
                                yield event
                            if is_given_up:
                                raise UnavailableError("the conductor gave up the request")
                            if generation.is_finished:
                                return
                except UnavailableError as error:
                    if num_runs >= _MAX_RUNS or not generation.token_ids:
                        raise  # before the first token the client itself retries
                    log.warning(
                        "run lost, continuing at another conductor",
                        error=str(error),
                        num_tokens=len(generation.token_ids),
                    )
                    generation.run_lost()
                    await asyncio.sleep(min(_RESUME_PAUSE_S, self._remaining_s(deadline)))
        finally:
            now = self._clock()
            if is_admitted:
                metrics.observe_end(model.name, generation, arrived_at, now)
            log.info(
                "request ended",
                reason=int(generation.finish_reason),
                choice=index,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_tokens=len(generation.token_ids),
                seconds=round(now - arrived_at, 3),
            )


def _tenant(context: aio.ServicerContext) -> str:
    """The tenant that the call's metadata names; empty if it names none."""
    for name, value in context.invocation_metadata() or ():
        if name == HEADER:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""
