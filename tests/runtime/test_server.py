"""The server plumbing over real channels: health, reflection, errors with details, deadlines, caps, drain."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.contract import errors
from paceline.contract.limits import MAX_MESSAGE_BYTES
from paceline.v1 import (
    peer_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)
from services.runtime import metrics
from services.runtime.channel import open_channel, split_endpoint
from services.runtime.error_mapping import from_rpc_error
from services.runtime.process import Process
from services.runtime.settings import ServerSettings
from tests.hosting import hosted

pytestmark = pytest.mark.asyncio
TARGET = "paceline.v1.TargetService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DEADLINE_S = 10.0


class Faulty(target_pb2_grpc.TargetServiceServicer, scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers, or raises what it is given, from each of the four kinds of method."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.release = asyncio.Event()
        self.num_cancelled = 0
        self.entered = asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> target_pb2.TargetServiceDescribeResponse:
        if self.error is not None:
            raise self.error
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return target_pb2.TargetServiceDescribeResponse(info=peer_pb2.PeerInfo(model_name="faulty"))

    async def StreamFeatures(
        self, request: Any, context: Any
    ) -> AsyncIterator[target_pb2.StreamFeaturesResponse]:
        yield target_pb2.StreamFeaturesResponse(start=1)
        if self.error is not None:
            raise self.error
        self.entered.set()
        await self.release.wait()
        yield target_pb2.StreamFeaturesResponse(start=2)

    async def Verify(self, requests: Any, context: Any) -> None:
        async for _ in requests:
            await context.write(target_pb2.VerifyResponse(hello=peer_pb2.PeerInfo(vocab_size=7)))
            if self.error is not None:
                raise self.error

    async def Report(self, requests: Any, context: Any) -> scheduler_pb2.ReportResponse:
        count = 0
        async for _ in requests:
            count += 1
            if self.error is not None:
                raise self.error
        return scheduler_pb2.ReportResponse(num_frames=count)


def build_with(servicer: Faulty, *, is_ready: bool = True) -> Callable[[Process], Awaitable[None]]:
    async def build(process: Process) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, process.server)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, process.server)
        process.add_service_name(TARGET)
        if is_ready:
            await process.ready()

    return build


def settings(**fields: Any) -> ServerSettings:
    return ServerSettings(**{"drain_s": 0.2, **fields})


async def health_of(channel: aio.Channel, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
    status: int = answer.status
    return status


async def failure(call: Awaitable[Any]) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_health_follows_ready() -> None:
    servicer = Faulty()
    async with (
        hosted("verifier", settings(), build_with(servicer, is_ready=False)) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        assert await health_of(channel) == NOT_SERVING
        assert await health_of(channel, TARGET) == NOT_SERVING
        await process.ready()
        assert await health_of(channel) == SERVING
        assert await health_of(channel, TARGET) == SERVING
        unknown = await failure(health_of(channel, "paceline.v1.NoSuchService"))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("is_on", [True, False])
async def test_reflection_lists_services_only_when_on(is_on: bool) -> None:
    async with (
        hosted("verifier", settings(reflection=is_on), build_with(Faulty())) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=DEADLINE_S
        )
        if not is_on:
            assert (await failure(call.read())).code() is grpc.StatusCode.UNIMPLEMENTED
            return
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {TARGET, "grpc.health.v1.Health"} <= names


KINDS: dict[str, Callable[[aio.Channel], Awaitable[Any]]] = {
    "unary_unary": lambda channel: target_pb2_grpc.TargetServiceStub(channel).Describe(
        target_pb2.TargetServiceDescribeRequest(), timeout=DEADLINE_S
    ),
    "unary_stream": lambda channel: drain_stream(
        target_pb2_grpc.TargetServiceStub(channel).StreamFeatures(
            target_pb2.StreamFeaturesRequest(), timeout=DEADLINE_S
        )
    ),
    "stream_stream": lambda channel: drain_stream(
        target_pb2_grpc.TargetServiceStub(channel).Verify(
            iter([target_pb2.VerifyRequest()]), timeout=DEADLINE_S
        )
    ),
    "stream_unary": lambda channel: scheduler_pb2_grpc.SchedulerServiceStub(channel).Report(
        iter([scheduler_pb2.ReportRequest()]), timeout=DEADLINE_S
    ),
}


async def drain_stream(call: Any) -> None:
    async for _ in call:
        pass


@pytest.mark.parametrize("kind", KINDS)
async def test_domain_error_becomes_status_with_details(kind: str) -> None:
    error = errors.InvalidRequestError("sampling.top_p", "must be in (0, 1]")
    async with (
        hosted("verifier", settings(), build_with(Faulty(error))) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        caught = await failure(KINDS[kind](channel))
    assert caught.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.details() == "sampling.top_p: must be in (0, 1]"
    bad_request = error_details_pb2.BadRequest()
    assert details_of(caught)[1].Unpack(bad_request)
    assert [violation.field for violation in bad_request.field_violations] == ["sampling.top_p"]
    again = from_rpc_error(caught)
    assert isinstance(again, errors.InvalidRequestError)
    assert (again.field, again.description) == ("sampling.top_p", "must be in (0, 1]")


@pytest.mark.parametrize(
    "kind",
    [
        errors.IncompatiblePeerError,
        errors.CapacityError,
        errors.UnavailableError,
        errors.DrainingError,
        errors.StreamProtocolError,
    ],
)
async def test_domain_errors_survive_the_wire(kind: type[errors.PacelineError]) -> None:
    async with (
        hosted("verifier", settings(), build_with(Faulty(kind("as told")))) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        caught = await failure(KINDS["unary_unary"](channel))
    assert caught.code().name == kind.status
    again = from_rpc_error(caught)
    assert type(again) is kind
    assert str(again) == "as told"


async def test_overload_says_when_to_retry() -> None:
    async with (
        hosted("verifier", settings(), build_with(Faulty(errors.CapacityError("full")))) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        caught = await failure(KINDS["unary_unary"](channel))
    details = details_of(caught)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert details[0].Unpack(info)
    assert details[1].Unpack(retry)
    assert (info.reason, info.domain) == ("CAPACITY_EXHAUSTED", "paceline")
    assert retry.retry_delay.ToMilliseconds() > 0


def details_of(error: aio.AioRpcError) -> list[Any]:
    status = status_pb2.Status()
    metadata: Any = error.trailing_metadata()
    status.ParseFromString(dict(metadata)["grpc-status-details-bin"])
    return list(status.details)


@pytest.mark.parametrize("kind", KINDS)
async def test_unknown_exception_is_internal_and_says_nothing(kind: str) -> None:
    async with (
        hosted("verifier", settings(), build_with(Faulty(KeyError("a secret path")))) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        caught = await failure(KINDS[kind](channel))
    assert caught.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.details() or "")
    assert len((caught.details() or "").split()[-1]) == 16


async def test_error_of_a_peer_is_passed_on() -> None:
    inner = Faulty(errors.CapacityError("no room"))
    async with (
        hosted("verifier", settings(), build_with(inner)) as peer,
        open_channel(f"127.0.0.1:{peer.port}") as to_peer,
    ):
        outer = Faulty()

        async def forward(request: Any, context: Any) -> Any:
            return await target_pb2_grpc.TargetServiceStub(to_peer).Describe(request, timeout=DEADLINE_S)

        outer.Describe = forward  # type: ignore[method-assign]
        async with (
            hosted("gateway", settings(), build_with(outer)) as process,
            open_channel(f"127.0.0.1:{process.port}") as channel,
        ):
            caught = await failure(KINDS["unary_unary"](channel))
    assert isinstance(from_rpc_error(caught), errors.CapacityError)


async def test_refused_connection_is_unavailable() -> None:
    with socket.socket() as probe:  # bound and not listening: nobody else can take the port
        probe.bind(("127.0.0.1", 0))
        async with open_channel(f"127.0.0.1:{probe.getsockname()[1]}") as channel:
            caught = await failure(KINDS["unary_unary"](channel))
    again = from_rpc_error(caught)
    assert type(again) is errors.UnavailableError
    assert again.__cause__ is caught


async def test_deadline_cancels_the_handler() -> None:
    servicer = Faulty()
    async with (
        hosted("verifier", settings(), build_with(servicer)) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        stub = target_pb2_grpc.TargetServiceStub(channel)
        caught = await failure(stub.Describe(target_pb2.TargetServiceDescribeRequest(), timeout=0.2))
        assert caught.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: servicer.num_cancelled == 1)


async def until(condition: Callable[[], bool], limit_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_messages_above_the_cap_are_refused_both_ways() -> None:
    async with hosted("verifier", settings(), build_with(Faulty())) as process:
        # The cap of our own channels stops us before the wire, the server's stops others.
        async with open_channel(f"127.0.0.1:{process.port}") as channel:
            big = scheduler_pb2.ReportRequest(key=scheduler_pb2.MeasurementKey(dtype="x" * MAX_MESSAGE_BYTES))
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            caught = await failure(stub.Report(iter([big]), timeout=60))
            assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        unbounded = [("grpc.max_send_message_length", -1)]
        async with aio.insecure_channel(f"127.0.0.1:{process.port}", options=unbounded) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            caught = await failure(stub.Report(iter([big]), timeout=60))
            assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (
                await stub.Report(iter([scheduler_pb2.ReportRequest()]), timeout=DEADLINE_S)
            ).num_frames == 1


async def test_drain_refuses_new_calls_and_finishes_admitted_ones() -> None:
    servicer = Faulty()
    order: list[str] = []

    async def build(process: Process) -> None:
        await build_with(servicer)(process)

        async def drained() -> None:
            order.append("drain")
            await servicer.release.wait()

        async def closed() -> None:
            order.append("close")

        process.on_drain(drained)
        process.on_close(closed)
        process.admit_while_draining("/paceline.v1.SchedulerService/Report")

    async with (
        hosted("verifier", settings(drain_s=DEADLINE_S), build) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        admitted = asyncio.ensure_future(KINDS["unary_unary"](channel))
        await asyncio.wait_for(servicer.entered.wait(), DEADLINE_S)
        stopping = asyncio.ensure_future(process.shutdown())
        await until(lambda: order == ["drain"])
        assert process.draining.is_set()
        assert await health_of(channel, TARGET) == NOT_SERVING
        refused = from_rpc_error(await failure(KINDS["unary_stream"](channel)))
        assert isinstance(refused, errors.DrainingError)
        assert (await KINDS["stream_unary"](channel)).num_frames == 1
        servicer.release.set()
        assert (await asyncio.wait_for(admitted, DEADLINE_S)).info.model_name == "faulty"
        await asyncio.wait_for(stopping, DEADLINE_S)
        assert order == ["drain", "close"]


async def test_drain_bound_cancels_what_is_left() -> None:
    servicer = Faulty()

    async def build(process: Process) -> None:
        await build_with(servicer)(process)
        process.on_drain(asyncio.Event().wait)  # type: ignore[arg-type]

    async with (
        hosted("verifier", settings(drain_s=0.1), build) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        admitted = asyncio.ensure_future(failure(KINDS["unary_unary"](channel)))
        await asyncio.wait_for(servicer.entered.wait(), DEADLINE_S)
        await asyncio.wait_for(process.shutdown(), DEADLINE_S)
        assert (await admitted).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert servicer.num_cancelled == 1


async def test_taken_port_is_an_error_that_names_it() -> None:
    async with hosted("verifier", settings(), build_with(Faulty())) as first:
        with pytest.raises(errors.UnavailableError, match=str(first.port)):
            async with hosted("verifier", settings(port=first.port), build_with(Faulty())):
                pytest.fail("two servers share a port")


async def test_metrics_are_served_under_the_documented_names(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    async with hosted(
        "verifier", settings(metrics_port=0, ready_file=ready_file), build_with(Faulty())
    ) as process:
        metrics.NUM_DRAFTS.labels("m").inc(3)
        metrics.NUM_DRAFT_TOKENS.labels("m").inc(9)
        metrics.NUM_ACCEPTED_TOKENS.labels("m").inc(5)
        metrics.NUM_ACCEPTED_TOKENS_PER_POS.labels("m", "0").inc(3)
        metrics.STEP_SECONDS.labels("m").observe(0.001)
        url = f"http://127.0.0.1:{process.metrics_port}/metrics"
        text = await asyncio.to_thread(
            lambda: urllib.request.urlopen(url, timeout=DEADLINE_S).read().decode()
        )
        written = json.loads(ready_file.read_text())
        assert (written["port"], written["metrics_port"]) == (process.port, process.metrics_port)
    for line in (
        'vllm:spec_decode_num_drafts_total{model_name="m"} 3.0',
        'vllm:spec_decode_num_draft_tokens_total{model_name="m"} 9.0',
        'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 5.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 3.0',
        'paceline_step_seconds_count{model_name="m"} 1.0',
        "# TYPE vllm:time_to_first_token_seconds histogram",
        "process_resident_memory_bytes",
    ):
        assert line in text, line


@pytest.mark.parametrize("endpoint", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "host:-1"])
async def test_bad_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(errors.InvalidRequestError):
        split_endpoint(endpoint)


async def test_endpoints_are_split() -> None:
    assert split_endpoint("drafter.svc:50052") == ("drafter.svc", 50052)
    assert split_endpoint("[::1]:1") == ("::1", 1)
