"""The scheduler as a real process: start, drain on SIGTERM, restart warm, children that do not outlive parents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.embedded.redis_server import RedisServer, RedisServerError, find_server_binary
from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.runtime.channel import open_channel

pytestmark = [pytest.mark.asyncio, pytest.mark.integration]
DEADLINE_S = 30.0
SERVICE = "paceline.v1.SchedulerService"


class Child:
    """A scheduler process and where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, ports: dict[str, int], log: Path) -> None:
        self.process = process
        self.port, self.metrics_port, self.pid = ports["port"], ports["metrics_port"], ports["pid"]
        self.log = log

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.log.read_text().splitlines()]


@contextlib.asynccontextmanager
async def scheduler_process(directory: Path, *flags: str) -> AsyncIterator[Child]:
    directory.mkdir()  # noqa: ASYNC240  # a moment, in a test
    ready_file, log = directory / "ready.json", directory / "log"
    with log.open("wb") as stream:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.scheduler", "--port", "0", "--metrics-port", "0"),
            *("--ready-file", str(ready_file), *flags),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not ready_file.exists():
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.01)
        yield Child(process, json.loads(ready_file.read_text()), log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def health_of(channel: aio.Channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service=SERVICE), timeout=DEADLINE_S
    )
    return int(answer.status)


async def test_drains_on_sigterm_and_the_next_process_starts_warm(
    harness: Any, redis_server: RedisServer, tmp_path: Path
) -> None:
    flags = ("--redis-url", redis_server.url, "--plan-interval-s", "0.05", "--flush-interval-s", "0.1")
    async with scheduler_process(tmp_path / "first", *flags) as child:
        assert child.pid == child.process.pid
        async with open_channel(f"127.0.0.1:{child.port}") as channel:
            assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            await harness.report(stub, harness.frames())
            planned = await harness.snapshot_when(stub, lambda s: s.policy.reason.startswith("length "))
            url = f"http://127.0.0.1:{child.metrics_port}/metrics"
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
            assert "paceline_redis_connected 1.0" in page
            assert (
                f'paceline_policy_draft_length{{method="eagle3",model_name="{harness.key.model_fingerprint[:12]}"'
                in page
            )
            # Health says NOT_SERVING before anything else ends: the watch sees it while the process still lives.
            statuses = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=DEADLINE_S
            )
            assert (await statuses.read()).status == health_pb2.HealthCheckResponse.SERVING
            child.process.send_signal(signal.SIGTERM)
            assert (await statuses.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await asyncio.wait_for(child.process.wait(), DEADLINE_S) == 0
        events = child.events()
        order = [
            event for event in events if event in ("listening", "ready", "signal", "draining", "stopped")
        ]
        assert order == ["listening", "ready", "signal", "draining", "stopped"]
    async with (
        scheduler_process(tmp_path / "second", *flags) as child,
        open_channel(f"127.0.0.1:{child.port}") as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.WatchPolicy(scheduler_pb2.WatchPolicyRequest(key=harness.key), timeout=DEADLINE_S)
        policy = (await call.read()).policy
        assert policy.draft_length == planned.policy.draft_length
        assert policy.version >= planned.policy.version
        call.cancel()


async def test_a_start_that_fails_exits_1_and_says_why(tmp_path: Path) -> None:
    async with scheduler_process(tmp_path / "first", "--redis-url", "") as child:
        done = await asyncio.to_thread(
            subprocess.run,
            [
                *(sys.executable, "-m", "services.scheduler", "--redis-url", ""),
                "--port",
                str(child.port),
                "--metrics-port",
                "off",
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 1
    assert str(child.port) in done.stderr
    assert "start failed" in done.stderr


async def test_no_password_reaches_the_log(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("hunter2\n")
    flags = ("--redis-url", "redis://user:swordfish@127.0.0.1:1/0", "--redis-password-file", str(secret))
    async with scheduler_process(tmp_path / "one", *flags) as child:
        child.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.process.wait(), DEADLINE_S) == 0
        text = child.log.read_text()
    assert "redis unavailable" in text
    assert "swordfish" not in text
    assert "hunter2" not in text


async def test_redis_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from paceline.embedded.redis_server import RedisServer\n"
        f"server = RedisServer.start(pathlib.Path({str(tmp_path)!r}))\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), DEADLINE_S))
    os.kill(pid, 0)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(DEADLINE_S):
        while is_alive(pid):
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_redis_server_binary_lookup(tmp_path: Path) -> None:
    assert os.access(find_server_binary(), os.X_OK)
    fake = tmp_path / "redis-server"
    with pytest.raises(RedisServerError):
        find_server_binary(fake)
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    assert find_server_binary(fake) == fake
    with pytest.raises(RedisServerError, match="did not start"):
        RedisServer.start(tmp_path / "data", binary=fake)
