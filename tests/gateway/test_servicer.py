"""The gateway over real sockets: order of events, errors, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from paceline.v1 import generation_pb2, sampling_pb2
from services.runtime import metrics
from tests.gateway.conftest import Gateway
from tests.gateway.scripted_conductor import Script, scripted_orchestrator
from tests.gateway.tiny_model import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
TEXT = "hello wörld, 😀 hello"
TOKENS = TOKENIZER.encode(TEXT).ids
TIMEOUT_S = 20.0
# Overruns the stack of whoever compiles it.
OVERRUN = "start: a0\n" + "\n".join(f"a{rule}: a{rule + 1}" for rule in range(4000)) + '\na4000: "x"'


def request(**fields) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="hello", **fields)


async def collect(stub, message, timeout: float = TIMEOUT_S) -> list[generation_pb2.GenerateResponse]:
    return [event async for event in stub.Generate(message, timeout=timeout, wait_for_ready=True)]


async def ready(stub) -> generation_pb2.GetModelInfoResponse:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return await stub.GetModelInfo(
                generation_pb2.GetModelInfoRequest(), timeout=1, wait_for_ready=True
            )
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def details(error: aio.AioRpcError) -> status_pb2.Status:
    trailers = dict(error.trailing_metadata())
    return status_pb2.Status.FromString(trailers["grpc-status-details-bin"])


async def test_events_come_in_order_and_end_once(gateway: Gateway) -> None:
    async with (
        scripted_orchestrator(Script(TOKENS, frame_sizes=(1, 3, 2))) as conductor,
        gateway(conductor.endpoint) as stub,
    ):
        info = await ready(stub)
        events = await collect(stub, request(sampling={"temperature": 0.8}, max_tokens=50))
    assert (info.model, info.vocab_size, info.method, info.placement) == (
        "tiny",
        300,
        "independent",
        "separate",
    )
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"chunk"}
    started, finished = events[0].started, events[-1].finished
    assert "".join(event.chunk.text for event in events) == TEXT
    assert [token for event in events for token in event.chunk.token_ids] == TOKENS
    run = conductor.runs[0]
    assert (started.seed, started.mode) == (run.sampling.seed, sampling_pb2.VERIFY_MODE_COUPLED)
    assert started.request_id == run.request_id == "request-1"
    assert started.num_prompt_tokens == len(run.prompt_token_ids)
    assert list(run.stop_token_ids) == [1]
    assert finished.reason == sampling_pb2.FINISH_REASON_LENGTH
    assert finished.stats.num_generated_tokens == len(TOKENS)
    assert list(finished.stats.drafted_per_position) == [finished.stats.num_target_passes] * 2


async def test_the_tenant_of_the_metadata_reaches_the_conductor(gateway: Gateway) -> None:
    async with (
        scripted_orchestrator(Script(TOKENS)) as conductor,
        gateway(conductor.endpoint) as stub,
    ):
        await ready(stub)
        for metadata, message, tenant in (
            ((("x-tenant", "acme"),), request(max_tokens=50), "acme"),
            ((("x-tenant", "acme"),), request(max_tokens=50, tenant="named"), "named"),
            ((), request(max_tokens=50), ""),
        ):
            call = stub.Generate(message, timeout=TIMEOUT_S, metadata=metadata)
            assert [event async for event in call]
            assert conductor.runs[-1].tenant == tenant
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in stub.Generate(request(), timeout=TIMEOUT_S, metadata=(("x-tenant", "a b"),)):
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "x-tenant" in str(caught.value.details())


async def test_a_stop_text_cancels_the_run(gateway: Gateway) -> None:
    script = Script(TOKENS, frame_sizes=(len(TOKENS) - 5, 1), hang_after=1, stats_in_every_frame=True)
    async with scripted_orchestrator(script) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        events = await collect(stub, request(stop=[{"type": "STOP_TYPE_TEXT", "text": "rld"}]))
        await until(lambda: conductor.num_cancelled == 1)
    assert "".join(event.chunk.text for event in events) == "hello wö"
    assert events[-1].finished.reason == sampling_pb2.FINISH_REASON_STOP
    assert events[-1].finished.stats.num_draft_tokens == 4


async def test_bad_input_is_named_and_nothing_else_notices(gateway: Gateway) -> None:
    async with scripted_orchestrator(Script(TOKENS)) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        good = asyncio.create_task(collect(stub, request()))
        bad = [
            (request(sampling={"temperature": float("nan")}), "sampling.temperature"),
            (request(max_tokens=10**9), "max_tokens"),
            (request(stop=[{"text": "x"}]), "stop[0].type"),
            (generation_pb2.GenerateRequest(tokens={"token_ids": [300]}), "tokens.token_ids[0]"),
            (generation_pb2.GenerateRequest(), "prompt"),
            (request(sampling={"constraint": {}}), "sampling.constraint"),
            (request(sampling={"constraint": {"regex": ""}}), "sampling.constraint.regex"),
            (request(sampling={"constraint": {"regex": "x" * 65_537}}), "sampling.constraint.regex"),
            (request(sampling={"constraint": {"regex": "("}}), "sampling.constraint.regex"),
            (request(sampling={"constraint": {"json_schema": "[]"}}), "sampling.constraint.json_schema"),
            (request(sampling={"constraint": {"grammar": "start: a"}}), "sampling.constraint.grammar"),
            (request(sampling={"constraint": {"grammar": OVERRUN}}), "sampling.constraint.grammar"),
            (request(sampling={"constraint": {"choice": {"texts": [""]}}}), "sampling.constraint.choice"),
            (request(sampling={"constraint": {"json_object": False}}), "sampling.constraint.json_object"),
            (request(sampling={"constraint": {"regex": "a"}}, ignore_eos=True), "ignore_eos"),
        ]
        for message, field in bad:
            with pytest.raises(aio.AioRpcError) as caught:
                await collect(stub, message)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            violations = error_details_pb2.BadRequest()
            assert any(detail.Unpack(violations) for detail in details(caught.value).details)
            assert violations.field_violations[0].field == field
        assert "".join(event.chunk.text for event in await good) == TEXT
    assert len(conductor.admissions) == 1


async def test_a_grammar_that_takes_long_makes_nobody_else_wait(gateway: Gateway) -> None:
    async with scripted_orchestrator(Script(TOKENS)) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        constraint = {"constraint": {"regex": "a?" * 30_000}}
        slow = asyncio.create_task(collect(stub, request(sampling=constraint)))
        await asyncio.sleep(0)
        for _ in range(5):
            await collect(stub, request())
        assert not slow.done()
        with pytest.raises(aio.AioRpcError, match="too complex"):
            await slow


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_lost_conductor_is_replaced_and_the_text_is_the_same(
    gateway: Gateway, gives_up: bool
) -> None:
    script = Script(TOKENS, frame_sizes=(2,), fail_first_run_after=3, gives_up=gives_up)
    async with scripted_orchestrator(script) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        events = await collect(stub, request())
    assert [len(conductor.admissions), len(conductor.runs)] == [2, 2]
    assert conductor.runs[1].num_resumed_tokens == 6
    assert conductor.runs[1].sampling == conductor.runs[0].sampling
    assert "".join(event.chunk.text for event in events) == TEXT
    assert [event.WhichOneof("event") for event in events].count("started") == 1


async def test_a_run_lost_before_the_first_token_is_unavailable(gateway: Gateway) -> None:
    async with (
        scripted_orchestrator(Script(TOKENS, fail_first_run_after=0)) as conductor,
        gateway(conductor.endpoint) as stub,
    ):
        await ready(stub)
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stub, request())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(conductor.runs) == 1


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE),  # the call had time left
    ],
)
async def test_refused_admission(
    gateway: Gateway, status: grpc.StatusCode, expected: grpc.StatusCode
) -> None:
    async with (
        scripted_orchestrator(Script(admit_status=status)) as conductor,
        gateway(conductor.endpoint) as stub,
    ):
        await ready(stub)
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stub, request())
    assert caught.value.code() is expected


async def test_no_director_is_unavailable(gateway: Gateway) -> None:
    async with scripted_orchestrator(Script()) as conductor:
        endpoint = conductor.endpoint
    async with gateway(endpoint) as stub:
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stub, request())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_without_an_end_is_unavailable(gateway: Gateway) -> None:
    script = Script((), finish_reason=sampling_pb2.FINISH_REASON_UNSPECIFIED)
    async with scripted_orchestrator(script) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stub, request())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "finish reason" in caught.value.details()


async def test_a_silent_conductor_is_given_up(gateway: Gateway) -> None:
    async with (
        scripted_orchestrator(Script(TOKENS, hang_after=0)) as conductor,
        gateway(conductor.endpoint, silence_timeout_s=0.2) as stub,
    ):
        await ready(stub)
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stub, request())
        await until(lambda: conductor.num_running == 0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "silent" in caught.value.details()


async def test_the_deadline_is_passed_on_and_kept(gateway: Gateway) -> None:
    async with (
        scripted_orchestrator(Script(TOKENS, hang_after=1)) as conductor,
        gateway(conductor.endpoint) as stub,
    ):
        await ready(stub)
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stub, request(), timeout=1.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: conductor.num_running == 0)
    assert 0.1 < conductor.remaining_s[0] < 1.6  # gRPC rounds a deadline up on the wire


async def test_a_client_that_goes_away_cancels_the_run(gateway: Gateway) -> None:
    async with (
        scripted_orchestrator(Script(TOKENS, hang_after=2)) as conductor,
        gateway(conductor.endpoint) as stub,
    ):
        await ready(stub)
        call = stub.Generate(request(), timeout=TIMEOUT_S)
        async for event in call:
            if event.WhichOneof("event") == "chunk":
                break
        call.cancel()
        await until(lambda: conductor.num_cancelled == 1)
        await until(lambda: metrics.REQUESTS_IN_FLIGHT.labels("tiny")._value.get() == 0)


async def test_more_requests_than_the_limit_are_refused(gateway: Gateway) -> None:
    async with (
        scripted_orchestrator(Script(TOKENS, hang_after=1)) as conductor,
        gateway(conductor.endpoint, max_requests=1) as stub,
    ):
        await ready(stub)
        first = stub.Generate(request(), timeout=TIMEOUT_S)
        await first.read()
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stub, request())
        first.cancel()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details(caught.value).details)


async def test_metrics_are_vllms(gateway: Gateway) -> None:
    def sample(name: str, **labels: str) -> float:
        return metrics.REGISTRY.get_sample_value(name, {"model_name": "tiny", **labels}) or 0.0

    names = ["vllm:e2e_request_latency_seconds_count", "vllm:time_to_first_token_seconds_count"]
    before = [sample(name) for name in names]
    successes = sample("vllm:request_success_total", finished_reason="length")
    async with scripted_orchestrator(Script(TOKENS)) as conductor, gateway(conductor.endpoint) as stub:
        await ready(stub)
        await collect(stub, request())
        await until(lambda: [sample(name) for name in names] == [count + 1 for count in before])
        assert sample("vllm:request_success_total", finished_reason="length") == successes + 1
