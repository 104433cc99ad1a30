"""Two scheduler processes that write to one Redis at once, and one that comes after them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis_asyncio

from paceline.embedded.redis_server import RedisServer
from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.runtime.channel import open_channel
from services.scheduler.subject import Subject
from tests.scheduler.test_process import scheduler_process

pytestmark = [pytest.mark.asyncio, pytest.mark.integration]


async def test_two_processes_lose_no_sample_and_a_third_starts_warm(
    harness: Any, redis_server: RedisServer, tmp_path: Path
) -> None:
    flags = (
        *("--redis-url", redis_server.url, "--plan-interval-s", "0.01"),
        *("--flush-interval-s", "0.01", "--refresh-interval-s", "0.1"),
    )
    num_rounds = 15
    async with (
        scheduler_process(tmp_path / "one", *flags) as one,
        scheduler_process(tmp_path / "two", *flags) as two,
        open_channel(f"127.0.0.1:{one.port}") as channel_one,
        open_channel(f"127.0.0.1:{two.port}") as channel_two,
    ):
        stubs = [scheduler_pb2_grpc.SchedulerServiceStub(channel) for channel in (channel_one, channel_two)]
        for _ in range(
            num_rounds
        ):  # both flush within the pause: compare-and-set meets a conflict again and again
            await asyncio.gather(
                *(
                    harness.report(stub, frames_of(harness, name))
                    for stub, name in zip(stubs, "ab", strict=True)
                )
            )
            await asyncio.sleep(0.02)
        expected = 2 * num_rounds * 4
        key = Subject.from_proto(harness.key)
        async with (
            redis_asyncio.Redis.from_url(redis_server.url, decode_responses=True) as client,
            asyncio.timeout(harness.DEADLINE_S),
        ):
            while True:
                values = {
                    part: json.loads(await client.get(key.redis_key(part)) or "{}")
                    for part in ("curve", "acceptance", "draft_time", "network", "outcomes")
                }
                if values["acceptance"].get("count") == 200 * expected:
                    break
                await asyncio.sleep(0.01)
    assert [bucket["count"] for bucket in values["curve"]["buckets"]] == [expected] * 4
    assert values["draft_time"]["count"] == 3 * expected
    assert [(p["drafter"], p["round_trip"]["count"]) for p in values["network"]["peers"]] == [
        ("a:1", 3 * expected // 2),
        ("b:1", 3 * expected // 2),
    ]
    assert [(d["drafter"], d["own"]["count"]) for d in values["outcomes"]["drafters"]] == [
        ("eagle3", 30 * expected)
    ]
    async with (
        scheduler_process(tmp_path / "three", *flags) as three,
        open_channel(f"127.0.0.1:{three.port}") as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.WatchPolicy(scheduler_pb2.WatchPolicyRequest(key=harness.key), timeout=harness.DEADLINE_S)
        first = (await call.read()).policy
        call.cancel()
        assert first.reason.startswith(
            "length "
        )  # nothing was reported to this one: it decides on what was left
        assert first.draft_length >= 2


def frames_of(harness: Any, drafter: str) -> list[scheduler_pb2.ReportRequest]:
    frames: list[scheduler_pb2.ReportRequest] = harness.frames()
    for frame in frames:
        frame.peers.add(conductor="c:1", drafter=f"{drafter}:1")
        frame.round_trip_peers.extend([0] * len(frame.round_trips_us))
        frame.acceptance.add(drafter="eagle3", cells=[200], trials=[30], accepted=[20])
    return frames
