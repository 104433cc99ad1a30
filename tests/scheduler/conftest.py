"""A scheduler in the test's own event loop, and what its tests report to it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.runtime.channel import open_channel
from services.runtime.process import Process
from services.scheduler.__main__ import build
from services.scheduler.settings import SchedulerSettings
from tests.hosting import hosted

Stub = scheduler_pb2_grpc.SchedulerServiceStub


class Harness:
    """Opens schedulers and speaks to them about one subject of its own."""

    DEADLINE_S = 20.0

    def __init__(self) -> None:
        self.key = scheduler_pb2.MeasurementKey(
            model_fingerprint=uuid.uuid4().hex,
            dtype="float32",
            device_name="test device: 1 thread",
            method="eagle3",
            placement="separate",
        )

    @contextlib.asynccontextmanager
    async def scheduler(self, redis_url: str, **fields: Any) -> AsyncIterator[tuple[Process, Stub]]:
        """A scheduler and a stub connected to it."""
        settings = SchedulerSettings(
            **{
                "port": 0,
                "metrics_port": None,
                "redis_url": redis_url,
                "redis_timeout_s": 0.5,
                "plan_interval_s": 0.02,
                "flush_interval_s": 0.05,
                "refresh_interval_s": 0.2,
                "drain_s": 5.0,
                **fields,
            }
        )
        async with (
            hosted("scheduler", settings, build) as process,
            open_channel(f"127.0.0.1:{process.port}") as channel,
        ):
            yield process, Stub(channel)

    def frames(self, *, rate: float = 0.8, num_frames: int = 4) -> list[scheduler_pb2.ReportRequest]:
        """Measurements of a target with a drafter of a given acceptance; enough to leave the cold start."""
        passes = 200
        accepted = [int(passes * rate**i) for i in (1, 2, 3, 4)]
        frames = [
            scheduler_pb2.ReportRequest(
                steps=[
                    scheduler_pb2.StepSample(num_rows=rows, num_sequences=1, step_us=20_000 + 100 * rows)
                    for rows in (1, 2, 5, 9)
                ],
                drafts=[
                    scheduler_pb2.DraftSample(num_draft_steps=k, num_sequences=1, draft_us=1000 * k)
                    for k in (1, 2, 4)
                ],
                round_trips_us=[400, 500, 600],
                drafted_per_position=[passes] * 4,
                accepted_per_position=accepted,
                num_running_sequences=1,
            )
            for _ in range(num_frames)
        ]
        frames[0].key.CopyFrom(self.key)
        return frames

    async def report(self, stub: Stub, frames: Iterable[scheduler_pb2.ReportRequest]) -> int:
        """Send frames and end the stream."""
        answer = await stub.Report(iter(list(frames)), timeout=self.DEADLINE_S)
        return int(answer.num_frames)

    async def snapshot(self, stub: Stub) -> scheduler_pb2.SnapshotResponse:
        """All that the scheduler knows about the subject."""
        request = scheduler_pb2.SnapshotRequest(key=self.key)
        response: scheduler_pb2.SnapshotResponse = await stub.Snapshot(request, timeout=self.DEADLINE_S)
        return response

    async def snapshot_when(
        self, stub: Stub, condition: Callable[[scheduler_pb2.SnapshotResponse], bool]
    ) -> scheduler_pb2.SnapshotResponse:
        """The first snapshot that meets a condition."""
        async with asyncio.timeout(self.DEADLINE_S):
            while True:
                response = await self.snapshot(stub)
                if condition(response):
                    return response
                await asyncio.sleep(0.01)


@pytest.fixture
def harness() -> Harness:
    return Harness()
