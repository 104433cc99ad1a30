"""SchedulerService: the wire side of the scheduler.

Responsible for: checking requests, and ending streams when the process drains. Deliberately does not know:
Redis, planning.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from paceline.contract.errors import DrainingError, InvalidRequestError, StreamProtocolError
from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.runtime import metrics
from services.runtime.tenants import TenantLabels
from services.scheduler.measurements import Measurements
from services.scheduler.registry import Registry
from services.scheduler.reports import measurements_of, passes_of
from services.scheduler.subject import Subject
from services.scheduler.subject_state import SubjectState

SERVICE_NAME = "paceline.v1.SchedulerService"

_END: Any = aio.EOF  # type: ignore[attr-defined]  # absent in the stubs


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers Report, WatchPolicy, Snapshot and ListSubjects.

    Args:
        registry: the subjects.
        draining: set when streams must end.
    """

    def __init__(self, registry: Registry, draining: asyncio.Event) -> None:
        self._registry = registry
        self._draining = draining
        self._tenant_labels = TenantLabels()

    async def Report(
        self, request_iterator: AsyncIterator[scheduler_pb2.ReportRequest], context: Any
    ) -> scheduler_pb2.ReportResponse:
        """Add measurements until the caller ends the stream."""
        num_frames = 0
        subject: Subject | None = None
        with contextlib.ExitStack() as use:
            state: SubjectState | None = None
            token = object()  # identifies this stream among those that report a load
            while (request := await self._read(context)) is not None:
                if request.HasField("key"):
                    named = Subject.from_proto(request.key)
                    if (
                        named != subject
                    ):  # a drafter joined or left: the stream now reports on another subject
                        use.close()
                        subject, state = named, None
                if subject is None:
                    raise StreamProtocolError("the first frame of a report must have a key")
                try:
                    delta = measurements_of(request, int(time.time() * 1000))
                    passes = passes_of(request)
                except InvalidRequestError:
                    metrics.REPORT_FRAMES.labels(subject.model_label, "refused").inc()
                    raise
                if state is None:
                    state = await self._registry.open(subject)
                    use.enter_context(self._registry.using(state, token))
                state.take(delta, passes, request.num_running_sequences)
                state.load[token] = request.num_running_sequences
                state.longest_draft = request.longest_draft or None
                metrics.REPORT_FRAMES.labels(subject.model_label, "taken").inc()
                self._count_tenants(subject, delta)
                num_frames += 1
        return scheduler_pb2.ReportResponse(num_frames=num_frames)

    def _count_tenants(self, subject: Subject, delta: Measurements) -> None:
        for tenant, use in delta.tenants.tenants.items():
            labels = subject.model_label, self._tenant_labels.of(tenant)
            metrics.TENANT_REQUESTS.labels(*labels).inc(use.num_requests)
            metrics.TENANT_TOKENS.labels(*labels).inc(use.num_tokens)
            metrics.TENANT_DRAFT_TOKENS.labels(*labels).inc(use.num_draft_tokens)
            metrics.TENANT_ACCEPTED_TOKENS.labels(*labels).inc(use.num_accepted_tokens)
            metrics.TENANT_DECODE_SECONDS.labels(*labels).inc(use.decode_us * 1e-6)

    async def WatchPolicy(
        self, request: scheduler_pb2.WatchPolicyRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchPolicyResponse]:
        """Send the policy in force, then each newer one. A slow reader skips versions."""
        state = await self._registry.open(Subject.from_proto(request.key))
        sent = -1
        with self._registry.using(state):
            while not self._draining.is_set():
                policy = state.policy
                if policy is not None and policy.version > sent:
                    sent = policy.version
                    yield scheduler_pb2.WatchPolicyResponse(policy=policy.to_proto())
                    continue
                async with state.changed:
                    if state.policy is policy and not self._draining.is_set():
                        await state.changed.wait()
        raise DrainingError("the scheduler is shutting down")

    async def Snapshot(
        self, request: scheduler_pb2.SnapshotRequest, context: Any
    ) -> scheduler_pb2.SnapshotResponse:
        """Everything known about a subject."""
        state = await self._registry.open(Subject.from_proto(request.key))
        assert state.policy is not None
        return scheduler_pb2.SnapshotResponse(
            policy=state.policy.to_proto(),
            measurements_json=json.dumps(state.to_dict()),
            is_redis_connected=self._registry.is_redis_connected,
        )

    async def ListSubjects(
        self, request: scheduler_pb2.ListSubjectsRequest, context: Any
    ) -> scheduler_pb2.ListSubjectsResponse:
        """The subjects of this process."""
        return scheduler_pb2.ListSubjectsResponse(
            keys=[subject.to_proto() for subject in self._registry.subjects]
        )

    async def _read(self, context: Any) -> scheduler_pb2.ReportRequest | None:
        """The next frame; None at the end of the stream.

        Raises:
            DrainingError: the process drains; measurements received so far are kept.
        """
        reading = asyncio.ensure_future(context.read())
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait((reading, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            if not reading.done():
                reading.cancel()
        if not reading.done() or reading.cancelled():
            raise DrainingError("the scheduler is shutting down")
        request = reading.result()
        return None if request is _END else request
