"""The scheduler over real gRPC with a real Redis: report, watch, warm start, outages, several writers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio as redis_asyncio
from grpc import aio

from paceline.contract.errors import DrainingError, InvalidRequestError, StreamProtocolError
from paceline.embedded.redis_server import RedisServer
from paceline.v1 import scheduler_pb2
from services.runtime import metrics
from services.runtime.error_mapping import from_rpc_error
from services.scheduler.subject import Subject

pytestmark = pytest.mark.asyncio


def passes_of(snapshot: scheduler_pb2.SnapshotResponse) -> int:
    return int(json.loads(snapshot.measurements_json)["acceptance"]["count"])


def is_planned(snapshot: scheduler_pb2.SnapshotResponse) -> bool:
    return snapshot.policy.reason.startswith("length ")


def redis_client(server: RedisServer) -> redis_asyncio.Redis:
    return redis_asyncio.Redis.from_url(server.url, decode_responses=True)


async def stored(server: RedisServer, subject: Subject, part: str) -> dict[str, Any] | None:
    async with redis_client(server) as client:
        raw = await client.get(subject.redis_key(part))
    try:
        value = json.loads(raw or "null")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


async def stored_when(server: RedisServer, subject: Subject, part: str, **expected: Any) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            value = await stored(server, subject, part)
            if value is not None and all(value.get(name) == wanted for name, wanted in expected.items()):
                return value
            await asyncio.sleep(0.01)


def watch(stub: Any, harness: Any) -> Any:
    return stub.WatchPolicy(scheduler_pb2.WatchPolicyRequest(key=harness.key), timeout=harness.DEADLINE_S)


async def test_reports_turn_a_cold_policy_into_a_measured_one(
    harness: Any, redis_server: RedisServer
) -> None:
    async with harness.scheduler(redis_server.url) as (_, stub):
        call = watch(stub, harness)
        first = (await call.read()).policy
        assert "cold start" in first.reason
        assert await harness.report(stub, harness.frames()) == 4
        second = (await call.read()).policy
        assert second.reason.startswith("length ")
        assert second.version > first.version
        assert second.draft_length >= 2
        assert second.expected_speedup > 1.2
        assert second.max_nodes_per_sequence >= second.draft_length
        call.cancel()
        snapshot = await harness.snapshot(stub)
        assert snapshot.is_redis_connected
        assert passes_of(snapshot) == 800
        curve = json.loads(snapshot.measurements_json)["curve"]
        assert [bucket["rows"] for bucket in curve["buckets"]] == [1, 2, 5, 9]


async def test_a_policy_asks_for_no_more_than_the_drafter_drafts(
    harness: Any, redis_server: RedisServer
) -> None:
    async with harness.scheduler(redis_server.url) as (_, stub):
        frames = harness.frames(rate=0.95)
        for frame in frames:
            frame.longest_draft = 2
        await harness.report(stub, frames)
        assert (await harness.snapshot_when(stub, is_planned)).policy.draft_length == 2
        await harness.report(stub, harness.frames(rate=0.95))  # another drafter, which knows no bound
        await harness.snapshot_when(stub, lambda snapshot: snapshot.policy.draft_length > 2)


async def test_redis_holds_readable_json_with_schema_and_ttl(harness: Any, redis_server: RedisServer) -> None:
    subject = Subject.from_proto(harness.key)
    async with harness.scheduler(redis_server.url, ttl_s=1000) as (_, stub):
        await harness.report(stub, harness.frames())
        value = await stored_when(redis_server, subject, "acceptance", count=800)
        assert value["schema_version"] == 3
        assert value["attempts"][0] > value["accepts"][0] > 0
        await harness.snapshot_when(stub, is_planned)
    async with redis_client(redis_server) as client:
        keys = [key async for key in client.scan_iter(match=f"*{harness.key.model_fingerprint}*")]
        assert sorted(key.rpartition(":")[2] for key in keys) == [
            *("acceptance", "curve", "draft_time", "network", "policy", "policy_history"),
        ]
        for key in keys:
            assert key.startswith(f"paceline:v1:{harness.key.model_fingerprint}:float32:")
            assert 900_000 < await client.pttl(key) <= 1_000_000
            is_list = key.endswith("_history")
            raw = await (client.lindex(key, 0) if is_list else client.get(key))
            assert json.loads(raw)["schema_version"] == 3


async def test_a_fresh_scheduler_starts_warm(harness: Any, redis_server: RedisServer) -> None:
    async with harness.scheduler(redis_server.url) as (_, stub):
        await harness.report(stub, harness.frames())
        before = await harness.snapshot_when(stub, is_planned)
    async with harness.scheduler(redis_server.url) as (_, stub):
        first = (await watch(stub, harness).read()).policy
        assert first.reason.startswith("length ")
        assert first.draft_length == before.policy.draft_length
        assert first.version >= before.policy.version
        assert passes_of(await harness.snapshot(stub)) == 800
        # Warm measurements are the base of what comes: nothing is lost, nothing counted twice.
        await harness.report(stub, harness.frames())
        await stored_when(redis_server, Subject.from_proto(harness.key), "acceptance", count=1600)


async def test_two_schedulers_merge_into_one(harness: Any, redis_server: RedisServer) -> None:
    subject = Subject.from_proto(harness.key)
    async with (
        harness.scheduler(redis_server.url) as (_, one),
        harness.scheduler(redis_server.url) as (_, other),
    ):
        await asyncio.gather(
            *(harness.report(stub, harness.frames(num_frames=2)) for stub in (one, other) for _ in range(10))
        )
        await stored_when(redis_server, subject, "acceptance", count=8000)
        curve = await stored_when(redis_server, subject, "curve")
        assert [bucket["count"] for bucket in curve["buckets"]] == [40] * 4
        network = await stored_when(redis_server, subject, "network", count=120)
        assert network["peers"][0]["round_trip"]["count"] == 120
        for stub in (one, other):
            await harness.snapshot_when(stub, lambda snapshot: passes_of(snapshot) == 8000)
        one_policy = (await harness.snapshot_when(one, is_planned)).policy
        other_policy = (await harness.snapshot_when(other, is_planned)).policy
        # Both decide on the same figures; between choices of nearly equal worth each stays with its own, and says what
        # it expected of it when it made it, on the figures of then.
        assert one_policy.expected_speedup == pytest.approx(other_policy.expected_speedup, rel=0.1)
        versions = {one_policy.version, other_policy.version}
        latest = await stored(redis_server, subject, "policy")
        assert latest is not None
        assert latest["version"] == max(versions)


async def test_values_of_another_schema_are_set_aside(harness: Any, redis_server: RedisServer) -> None:
    subject = Subject.from_proto(harness.key)
    old = json.dumps({"schema_version": 1, "count": 3, "attempts": [3.0], "accepts": [2.0]})
    async with redis_client(redis_server) as client:
        await client.set(subject.redis_key("acceptance"), old)
        async with harness.scheduler(redis_server.url, ttl_s=1000) as (_, stub):
            await harness.report(stub, harness.frames())
            await stored_when(redis_server, subject, "acceptance", count=800)
        aside = subject.redis_key("acceptance") + ":aside"
        assert await client.get(aside) == old
        assert 0 < await client.pttl(aside) <= 1_000_000


async def test_scripts_are_sent_again_to_a_server_that_forgot_them(
    harness: Any, redis_server: RedisServer
) -> None:
    subject = Subject.from_proto(harness.key)
    async with harness.scheduler(redis_server.url) as (_, stub), redis_client(redis_server) as client:
        for round_ in (1, 2):
            await harness.report(stub, harness.frames())
            await stored_when(redis_server, subject, "acceptance", count=800 * round_)
            await client.script_flush()
        calls = (await client.info("commandstats")).get("cmdstat_evalsha", {})
    assert calls["calls"] > calls.get("failed_calls", 0) > 0


async def test_the_history_of_policies_says_why_and_outlives_the_process(
    harness: Any, redis_server: RedisServer
) -> None:
    async with harness.scheduler(redis_server.url) as (_, stub):
        await harness.report(stub, harness.frames())
        await harness.snapshot_when(stub, is_planned)
    async with harness.scheduler(redis_server.url) as (_, stub):
        history = json.loads((await harness.snapshot(stub)).measurements_json)["policy_history"]
    reasons = [policy["reason"] for policy in history]
    assert any(reason.startswith("length ") for reason in reasons)
    assert "cold start" in reasons[-1]
    versions = [policy["version"] for policy in history]
    assert versions == sorted(versions, reverse=True)


async def test_losing_redis_changes_nothing_for_clients(
    harness: Any, own_redis_server: RedisServer, tmp_path: Path
) -> None:
    subject = Subject.from_proto(harness.key)
    async with harness.scheduler(own_redis_server.url) as (process, stub):
        await harness.report(stub, harness.frames())
        await stored_when(own_redis_server, subject, "acceptance", count=800)
        before = await harness.snapshot_when(stub, is_planned)
        own_redis_server.kill()
        gone = await harness.snapshot_when(stub, lambda snapshot: not snapshot.is_redis_connected)
        assert gone.policy == before.policy
        assert passes_of(gone) == 800
        assert (await watch(stub, harness).read()).policy == before.policy
        # Measurements go on, and so do decisions.
        await harness.report(stub, harness.frames(rate=0.01, num_frames=40))
        off = await harness.snapshot_when(stub, lambda snapshot: snapshot.policy.draft_length == 0)
        assert off.policy.version > before.policy.version
        assert not process.draining.is_set()
        again = RedisServer.start(tmp_path / "again", port=own_redis_server.port)
        try:
            # It comes back empty and gets everything, not only what was measured since.
            await harness.snapshot_when(stub, lambda snapshot: snapshot.is_redis_connected)
            await stored_when(again, subject, "acceptance", count=8800)
            await stored_when(again, subject, "policy", version=off.policy.version)
        finally:
            again.stop()


async def test_starting_without_redis_and_finding_it_later(
    harness: Any, own_redis_server: RedisServer, tmp_path: Path
) -> None:
    subject = Subject.from_proto(harness.key)
    url, port = own_redis_server.url, own_redis_server.port
    async with harness.scheduler(url) as (_, stub):
        await harness.report(stub, harness.frames())
        await stored_when(own_redis_server, subject, "acceptance", count=800)
    own_redis_server.kill()
    async with harness.scheduler(url) as (_, stub):
        cold = (await watch(stub, harness).read()).policy
        assert "cold start" in cold.reason
        await harness.report(stub, harness.frames(num_frames=1))
        again = RedisServer.start(tmp_path / "again", port=port)
        try:
            await stored_when(again, subject, "acceptance", count=200)
            await stored_when(again, subject, "policy")
        finally:
            again.stop()


async def test_policy_versions_rise_over_restarts_even_when_redis_was_emptied(
    harness: Any, own_redis_server: RedisServer
) -> None:
    versions: list[int] = []
    for is_flushed in (False, True, False):
        if is_flushed:
            async with redis_client(own_redis_server) as client:
                await client.flushall()
        async with harness.scheduler(own_redis_server.url) as (_, stub):
            await harness.report(stub, harness.frames())
            versions.append((await harness.snapshot_when(stub, is_planned)).policy.version)
    assert versions == sorted(versions)
    assert versions[1] > versions[0]


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"schema_version":99}',
        '{"schema_version":1}',
        '{"schema_version":1,"count":-1}',
    ],
)
async def test_unreadable_values_are_replaced(harness: Any, redis_server: RedisServer, garbage: str) -> None:
    subject = Subject.from_proto(harness.key)
    async with redis_client(redis_server) as client:
        for part in ("curve", "acceptance", "draft_time", "network", "policy"):
            await client.set(subject.redis_key(part), garbage)
    async with harness.scheduler(redis_server.url) as (_, stub):
        await harness.report(stub, harness.frames())
        await stored_when(redis_server, subject, "acceptance", count=800)
        snapshot = await harness.snapshot_when(stub, is_planned)
        await stored_when(redis_server, subject, "policy", version=snapshot.policy.version)


async def test_tenants_are_in_the_snapshot_and_in_the_metrics_up_to_a_bound(harness: Any) -> None:
    async with harness.scheduler("") as (_, stub):
        frame = harness.frames()[0]
        for i in range(65):
            frame.tenants.add(
                tenant=f"tenant-{i}",
                num_requests=1,
                num_tokens=30,
                num_draft_tokens=20,
                num_accepted_tokens=15,
            )
        await harness.report(stub, [frame])
        snapshot = json.loads((await harness.snapshot(stub)).measurements_json)
    assert snapshot["tenants"]["count"] == 65
    assert snapshot["tenants"]["tenants"][0]["acceptance"] == 0.75
    model = harness.key.model_fingerprint[:12]
    counted = {
        sample.labels["tenant"]: sample.value
        for family in metrics.REGISTRY.collect()
        if family.name == "paceline_tenant_accepted_tokens"
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["model_name"] == model
    }
    assert len(counted) == 65
    assert counted["tenant-0"] == counted["other"] == 15


async def test_without_redis_by_choice(harness: Any) -> None:
    async with harness.scheduler("") as (_, stub):
        await harness.report(stub, harness.frames())
        snapshot = await harness.snapshot_when(stub, is_planned)
        assert not snapshot.is_redis_connected


async def test_bad_streams_are_refused_and_leave_no_trace(harness: Any) -> None:
    async with harness.scheduler("") as (_, stub):
        frames = harness.frames()
        keyless = frames[1]
        with pytest.raises(aio.AioRpcError) as caught:
            await harness.report(stub, [keyless])
        assert isinstance(from_rpc_error(caught.value), StreamProtocolError)
        bad = scheduler_pb2.ReportRequest(key=harness.key, steps=[scheduler_pb2.StepSample(num_rows=0)])
        with pytest.raises(aio.AioRpcError) as caught:
            await harness.report(stub, [bad])
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequestError)
        assert error.field == "steps.num_rows"
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Snapshot(scheduler_pb2.SnapshotRequest(), timeout=harness.DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert passes_of(await harness.snapshot(stub)) == 0


async def test_load_follows_streams_and_a_stream_may_change_its_subject(harness: Any) -> None:
    async with harness.scheduler("") as (_, stub):
        call = stub.Report(timeout=harness.DEADLINE_S)
        first, second, *_ = harness.frames()
        first.num_running_sequences = 7
        await call.write(first)
        await harness.snapshot_when(
            stub, lambda s: json.loads(s.measurements_json)["num_running_sequences"] == 7
        )
        second.key.CopyFrom(harness.key)
        second.key.method = "dflash"
        await call.write(second)
        await harness.snapshot_when(
            stub, lambda s: json.loads(s.measurements_json)["num_running_sequences"] == 0
        )
        await call.done_writing()
        assert (await call).num_frames == 2
        assert passes_of(await harness.snapshot(stub)) == 200


async def read_all(call: Any) -> None:
    while await call.read() is not aio.EOF:
        pass


async def test_draining_ends_streams_and_keeps_what_was_reported(
    harness: Any, redis_server: RedisServer
) -> None:
    async with harness.scheduler(redis_server.url, flush_interval_s=60) as (process, stub):
        watching = watch(stub, harness)
        await watching.read()
        call = stub.Report(timeout=harness.DEADLINE_S)
        for frame in harness.frames():
            await call.write(frame)
        await harness.snapshot_when(stub, lambda snapshot: passes_of(snapshot) == 800)
        await asyncio.wait_for(process.shutdown(), 3)
        for ending in (read_all(watching), call):
            with pytest.raises(aio.AioRpcError) as caught:
                await ending
            assert isinstance(from_rpc_error(caught.value), DrainingError)
    value = await stored(redis_server, Subject.from_proto(harness.key), "acceptance")
    assert value is not None
    assert value["count"] == 800


async def test_subjects_are_bounded_and_idle_ones_leave(harness: Any, redis_server: RedisServer) -> None:
    async with harness.scheduler(redis_server.url, max_subjects=2) as (_, stub):
        kept = watch(stub, harness)
        await kept.read()
        for i in range(5):
            key = scheduler_pb2.MeasurementKey()
            key.CopyFrom(harness.key)
            key.dtype = f"dtype{i}"
            await stub.Snapshot(scheduler_pb2.SnapshotRequest(key=key), timeout=harness.DEADLINE_S)
        other = scheduler_pb2.MeasurementKey()
        other.CopyFrom(harness.key)
        other.dtype = "second"
        second = stub.WatchPolicy(scheduler_pb2.WatchPolicyRequest(key=other), timeout=harness.DEADLINE_S)
        await second.read()
        key.dtype = "third"
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Snapshot(scheduler_pb2.SnapshotRequest(key=key), timeout=harness.DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
