"""The Report stream: measurements from the conductor to the scheduler.

Responsible for: sending a frame now and then, and connecting again whenever the stream ends. Deliberately does not
know what is measured. A slow or absent scheduler costs nothing: samples that it does not take are dropped in
orchestrator.reports. Run by orchestrator.conductor.
"""

from __future__ import annotations

import asyncio

import grpc
import structlog

from orchestrator.reports import Reports
from paceline.v1 import scheduler_pb2_grpc
from services.runtime.channel import open_channel
from services.runtime.tls import Tls

INTERVAL_S = 0.25
WRITE_TIMEOUT_S = 2.0
MIN_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0

log = structlog.get_logger()


async def send_reports(reports: Reports, endpoint: str, tls: Tls | None) -> None:
    """Sends to the scheduler until cancelled."""
    backoff_s, reason = MIN_BACKOFF_S, ""
    while True:
        channel = open_channel(endpoint, tls)
        try:
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Report()
            while True:
                await asyncio.sleep(INTERVAL_S)
                frame = reports.take() if reports.has_key else None
                if frame is not None:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await call.write(frame)
                    backoff_s = MIN_BACKOFF_S
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            if type(error).__name__ != reason:
                reason = type(error).__name__
                log.warning("report stream down", endpoint=endpoint, error=str(error) or reason)
        finally:
            await channel.close(None)
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
