"""The Redis connection: availability, bounded waiting, coming back."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from paceline.contract.errors import InvalidRequestError
from paceline.embedded.redis_server import RedisServer
from services.runtime.redis_store import RedisStore, StoreUnavailableError

pytestmark = pytest.mark.asyncio


def open_store(url: str) -> RedisStore:
    return RedisStore(url, timeout_s=0.5, max_backoff_s=0.2, probe_interval_s=0.1)


async def until_available(store: RedisStore, wanted: bool) -> None:
    async with asyncio.timeout(10):
        while store.available is not wanted:
            await asyncio.sleep(0.005)


async def test_a_store_that_never_had_a_server_refuses_at_once(own_redis_server: RedisServer) -> None:
    url = own_redis_server.url
    own_redis_server.kill()
    store = open_store(url)
    try:
        assert await store.start(wait_s=0.2) is False
        before = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await store.run(lambda client: client.get("x"))
        assert time.monotonic() - before < 0.3
    finally:
        await store.close()


async def test_losing_and_finding_a_server(own_redis_server: RedisServer, tmp_path: Path) -> None:
    store = open_store(own_redis_server.url)
    seen: list[bool] = []

    async def listen(is_available: bool) -> None:
        seen.append(is_available)

    store.on_change(listen)
    try:
        assert await store.start(wait_s=5)
        assert await store.run(lambda client: client.set("x", "1"))
        own_redis_server.kill()
        await until_available(store, False)
        with pytest.raises(StoreUnavailableError):
            await store.run(lambda client: client.get("x"))
        again = RedisServer.start(tmp_path / "again", port=own_redis_server.port)
        try:
            assert await store.wait_available(10)
            assert await store.run(lambda client: client.get("x")) is None
        finally:
            again.stop()
        await until_available(store, False)
        async with asyncio.timeout(10):
            while seen != [True, False, True, False]:
                await asyncio.sleep(0.005)
    finally:
        await store.close()


async def test_a_frozen_server_is_bounded_by_the_timeout(own_redis_server: RedisServer) -> None:
    store = open_store(own_redis_server.url)
    try:
        assert await store.start(wait_s=5)
        own_redis_server.process.send_signal(signal.SIGSTOP)
        before = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await store.run(lambda client: client.get("x"))
        assert time.monotonic() - before < 3
        assert store.available is False
        own_redis_server.process.send_signal(signal.SIGCONT)
        assert await store.wait_available(10)
    finally:
        await store.close()


async def test_a_refusal_is_not_an_outage(own_redis_server: RedisServer) -> None:
    store = open_store(own_redis_server.url)
    try:
        assert await store.start(wait_s=5)
        await store.run(lambda client: client.config_set("maxmemory", "1mb"))
        with pytest.raises(StoreUnavailableError, match="refused"):
            await store.run(lambda client: client.set("x", "1" * 2_000_000))
        with pytest.raises(StoreUnavailableError, match="refused"):
            await store.run(lambda client: client.execute_command("NOSUCHCOMMAND"))
        assert store.available
    finally:
        await store.close()


async def test_wrong_password_is_unavailable_and_right_one_works(own_redis_server: RedisServer) -> None:
    admin = open_store(own_redis_server.url)
    assert await admin.start(wait_s=5)
    await admin.run(lambda client: client.config_set("requirepass", "right"))
    await admin.close()
    for password, expected in (("wrong", False), (None, False), ("right", True)):
        store = RedisStore(own_redis_server.url, password=password, timeout_s=0.5, max_backoff_s=0.2)
        try:
            assert await store.start(wait_s=5 if expected else 0.3) is expected
        finally:
            await store.close()


async def test_urls_are_checked() -> None:
    with pytest.raises(InvalidRequestError):
        RedisStore("http://localhost")
