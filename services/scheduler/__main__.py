"""Entry point of the scheduler process: ``paceline-scheduler``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from paceline.contract.errors import InvalidRequestError
from paceline.v1 import scheduler_pb2_grpc
from services.runtime.lifecycle import serve
from services.runtime.process import Process
from services.runtime.redis_store import RedisStore
from services.runtime.settings import load
from services.runtime.tasks import end_task
from services.scheduler.registry import Registry
from services.scheduler.servicer import SERVICE_NAME, SchedulerServicer
from services.scheduler.settings import SchedulerSettings
from services.scheduler.store import MeasurementStore

_FIRST_CONNECT_S = 2.0  # how long a start waits for Redis, to begin warm; after that it serves without


MakeServicer = Callable[[Registry, asyncio.Event], SchedulerServicer]


async def build(process: Process, make_servicer: MakeServicer = SchedulerServicer) -> None:
    """Add the servicer to a process and start what it needs.

    Args:
        process: its settings are the scheduler's.
        make_servicer: makes the servicer from the registry and the event that ends streams; experiments pass
            their own.
    """
    settings = process.settings
    assert isinstance(settings, SchedulerSettings)
    redis = _redis(settings)
    store = MeasurementStore(redis, settings.ttl_s) if redis is not None else None
    registry = Registry(
        store,
        settings.planning_limits,
        max_subjects=settings.max_subjects,
        flush_interval_s=settings.flush_interval_s,
        refresh_interval_s=settings.refresh_interval_s,
    )
    if redis is not None:
        redis.on_change(registry.on_redis_change)
        process.on_close(redis.close)
        if not await redis.start(wait_s=_FIRST_CONNECT_S):
            process.log.warning("starting without redis", endpoint=urlsplit(settings.redis_url).hostname)
    planning = asyncio.create_task(registry.run(settings.plan_interval_s), name="planning")

    async def close() -> None:
        await end_task(planning)
        await registry.flush()

    process.on_drain(registry.wake)
    process.on_close(close)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
        make_servicer(registry, process.draining), process.server
    )
    process.add_service_name(SERVICE_NAME)
    await process.ready()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the scheduler until SIGTERM."""
    serve("scheduler", load(SchedulerSettings, sys.argv[1:] if argv is None else argv), build)


def _redis(settings: SchedulerSettings) -> RedisStore | None:
    if not settings.redis_url:
        return None
    password = None
    if settings.redis_password_file is not None:
        try:
            password = settings.redis_password_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InvalidRequestError("redis_password_file", f"cannot be read: {error}") from error
    return RedisStore(
        settings.redis_url,
        username=settings.redis_username,
        password=password,
        ca_file=settings.redis_ca,
        timeout_s=settings.redis_timeout_s,
    )


if __name__ == "__main__":
    main()
