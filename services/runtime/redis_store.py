"""One Redis connection that may be lost and restored.

Responsible for: bounded time-outs, whether Redis can be reached, reconnecting with bounded back-off and full
jitter, and failing fast while Redis is unreachable. Deliberately does not know: keys or values.

Called by services.scheduler.store. Works with servers of Redis 6.2 or newer (Redis, Valkey). It uses
asyncio.timeout and never wait_for: on Python 3.11 the latter swallows a cancellation that arrives at the moment
when the awaited call is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis.asyncio as redis_asyncio
import structlog
from redis import exceptions as redis_exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from paceline.contract.errors import InvalidRequestError, UnavailableError
from services.runtime.metrics import REDIS_CONNECTED, REDIS_FAILURES
from services.runtime.tasks import end_task

T = TypeVar("T")
Listener = Callable[[bool], Awaitable[None]]

_PROBE_KEY = "paceline:v1:probe"  # reading a key shows a user whose ACL excludes our keys as unavailable

_log = structlog.get_logger()


class StoreUnavailableError(UnavailableError):
    """Redis cannot be reached, or refused the operation (out of memory, read-only, no permission)."""

    reason = "STORE_UNAVAILABLE"


class RedisStore:
    """A Redis connection with an `available` flag.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``; may contain user and password.
        username: ACL user, if the URL names none.
        password: its password, if the URL has none.
        ca_file: PEM authorities for ``rediss://``.
        timeout_s: time limit of connecting and of each operation.
        max_backoff_s: longest pause between attempts to reconnect.
        probe_interval_s: pause between probes while connected, so that a lost Redis is detected without
            traffic.
    """

    def __init__(
        self,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        ca_file: Path | None = None,
        timeout_s: float = 1.0,
        max_backoff_s: float = 5.0,
        probe_interval_s: float = 2.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise InvalidRequestError("redis_url", "expected redis://, rediss:// or unix://")
        extra: dict[str, Any] = {}
        if username is not None and parts.username is None:
            extra["username"] = username
        if password is not None and parts.password is None:
            extra["password"] = password
        if ca_file is not None:
            extra["ssl_ca_certs"] = str(ca_file)
        self._client: redis_asyncio.Redis = redis_asyncio.Redis.from_url(
            url,
            socket_timeout=None,  # `run` bounds operations, without redis-py's wait_for
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # the loop below retries, once, in one place
            health_check_interval=0,
            decode_responses=True,
            max_connections=4,
            **extra,
        )
        self._timeout_s = timeout_s
        self._max_backoff_s = max_backoff_s
        self._probe_interval_s = probe_interval_s
        self._is_available = False
        self._lost = asyncio.Event()
        self._changed = asyncio.Condition()
        self._listeners: list[Listener] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        """Whether the last probe or operation reached Redis."""
        return self._is_available

    def on_change(self, listener: Listener) -> None:
        """Call ``listener(available)`` after each change, from the store's own task."""
        self._listeners.append(listener)

    async def start(self, wait_s: float = 0.0) -> bool:
        """Begin to connect, and wait up to ``wait_s`` for the first success. Returns `available`."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_connected(), name="redis")
        return await self.wait_available(wait_s)

    async def wait_available(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` until Redis can be reached; returns whether it can."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self._is_available)
        return self._is_available

    async def close(self) -> None:
        """End the background task and the connections."""
        if self._task is not None:
            await end_task(self._task)
            self._task = None
        self._is_available = False
        await self._client.aclose()

    async def run(self, operation: Callable[[redis_asyncio.Redis], Awaitable[T]]) -> T:
        """Run one operation, bounded in time; fails at once while Redis is unreachable.

        Raises:
            StoreUnavailableError: see the class.
        """
        if not self._is_available:
            raise StoreUnavailableError("redis cannot be reached")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await operation(self._client)
        except (
            redis_exceptions.ConnectionError,
            redis_exceptions.TimeoutError,
            TimeoutError,
            OSError,
        ) as error:
            REDIS_FAILURES.labels("connection").inc()
            self._is_available = False  # callers see it at once; the task notifies listeners
            self._lost.set()
            raise StoreUnavailableError(f"redis was lost: {type(error).__name__}") from error
        except redis_exceptions.RedisError as error:  # reachable, but it said no
            REDIS_FAILURES.labels("refused").inc()
            raise StoreUnavailableError(f"redis refused: {error}") from error

    async def _keep_connected(self) -> None:
        num_failures = 0
        was_available: bool | None = None
        while True:
            is_available, cause = await self._probe()
            if is_available:
                self._lost.clear()
            self._is_available = is_available
            if is_available != was_available:
                was_available = is_available
                await self._publish(is_available, cause)
            elif is_available:  # an operation may have failed although this probe did not: waiters continue
                await self._notify()
            if is_available:
                num_failures = 0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._probe_interval_s):
                        await self._lost.wait()
                if self._lost.is_set() and was_available:
                    was_available = False
                    await self._publish(False, "operation failed")
            else:
                num_failures += 1
                await self._client.connection_pool.disconnect()  # connections to a lost server are useless
                limit_s = min(self._max_backoff_s, 0.05 * 2 ** min(num_failures, 16))
                await asyncio.sleep(random.uniform(0.02, limit_s))  # full jitter

    async def _probe(self) -> tuple[bool, str]:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.get(_PROBE_KEY)
        except (redis_exceptions.RedisError, TimeoutError, OSError) as error:
            return False, f"{type(error).__name__}: {error}"
        return True, ""

    async def _publish(self, is_available: bool, cause: str) -> None:
        REDIS_CONNECTED.set(1.0 if is_available else 0.0)
        if is_available:
            _log.info("redis connected")
        else:
            _log.warning("redis unavailable", cause=cause)
        await self._notify()
        for listener in self._listeners:
            try:
                await listener(is_available)
            except Exception as error:  # an error in a listener must not end reconnection
                _log.error("redis listener failed", exc_info=error)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
