"""What the gateway measures of its requests, under vLLM's names where vLLM has the metric.

Responsible for: when each collector of :mod:`services.runtime.metrics` is set. The verifier counts processed
tokens and running sequences; the gateway counts requests as clients see them. Deliberately does not know: how
metrics are served. Called by: :mod:`services.gateway.servicer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.v1 import sampling_pb2
from services.gateway.checked_request import CheckedRequest
from services.gateway.generation import Generation
from services.runtime import metrics


@contextmanager
def in_flight(model: str) -> Iterator[None]:
    """Counts a request as in flight."""
    gauge = metrics.REQUESTS_IN_FLIGHT.labels(model)
    gauge.inc()
    try:
        yield
    finally:
        gauge.dec()


def observe_admission(model: str, request: CheckedRequest) -> None:
    """A request was admitted."""
    metrics.REQUEST_PROMPT_TOKENS.labels(model).observe(len(request.prompt_token_ids))
    metrics.REQUEST_MAX_TOKENS.labels(model).observe(request.max_new_tokens)


def observe_end(model: str, generation: Generation, arrived_at: float, now: float) -> None:
    """An admitted request ended, for whatever reason."""
    num_tokens = len(generation.token_ids)
    metrics.REQUEST_GENERATION_TOKENS.labels(model).observe(num_tokens)
    metrics.REQUEST_LATENCY.labels(model).observe(now - arrived_at)
    if generation.first_token_at is not None:
        metrics.TIME_TO_FIRST_TOKEN.labels(model).observe(generation.first_token_at - arrived_at)
        if num_tokens > 1:  # the mean of the request: tokens come several at a time
            mean_s = (now - generation.first_token_at) / (num_tokens - 1)
            metrics.INTER_TOKEN_LATENCY.labels(model).observe(mean_s)
    if generation.is_finished:
        name = sampling_pb2.FinishReason.Name(generation.finish_reason).removeprefix("FINISH_REASON_").lower()
        metrics.REQUEST_SUCCESS.labels(model, name).inc()


def observe_failure(model: str, reason: str) -> None:
    """A request ended with an error status."""
    metrics.REQUEST_FAILURES.labels(model, reason).inc()
