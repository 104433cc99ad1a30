"""Signals, on a real process whose drain never ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytestmark = [pytest.mark.asyncio, pytest.mark.integration]
DEADLINE_S = 30.0
CHILD = """
import asyncio, sys
from services.runtime.lifecycle import serve
from services.runtime.settings import ServerSettings, load

async def build(process):
    process.on_drain(asyncio.Event().wait)
    if "slow" in sys.argv[1]:
        process.log.info("building")
        await asyncio.Event().wait()
    if "broken" in sys.argv[1]:
        raise RuntimeError("as planned")
    await process.ready()

serve("verifier", load(ServerSettings, sys.argv[2:]), build)
"""


class Child:
    """A process and the events it logged so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []

    async def until(self, event: str) -> None:
        """Read log lines up to an event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := await self.process.stderr.readline():
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == event:
                    return
        pytest.fail(f"{event} was never logged: {self.events}")

    async def exit_code(self) -> int:
        """Wait for the end, keeping what is still logged."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := await self.process.stderr.readline():
                self.events.append(json.loads(line))
            return await self.process.wait()

    @property
    def names(self) -> list[str]:
        """The events alone."""
        return [event["event"] for event in self.events]


@contextlib.asynccontextmanager
async def child(kind: str, *flags: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, kind, *flags),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_drain_bound_holds_and_the_exit_is_clean(number: signal.Signals) -> None:
    async with child("plain", "--drain-s", "0.2") as process:
        await process.until("ready")
        process.process.send_signal(number)
        assert await process.exit_code() == 0
        assert process.names[-2:] == ["drain bound passed; cancelling what is left", "stopped"]


async def test_a_second_signal_exits_at_once() -> None:
    async with child("plain", "--drain-s", "600") as process:
        await process.until("ready")
        process.process.send_signal(signal.SIGTERM)
        await process.until("draining")
        process.process.send_signal(signal.SIGTERM)
        assert await process.exit_code() == 128 + signal.SIGTERM
        assert "stopped" not in process.names


async def test_a_signal_while_starting_stops_the_start() -> None:
    async with child("slow") as process:
        await process.until("building")
        process.process.send_signal(signal.SIGTERM)
        assert await process.exit_code() == 0
        assert "listening" not in process.names


async def test_a_start_that_fails_is_logged_and_exits_1() -> None:
    async with child("broken") as process:
        assert await process.exit_code() == 1
        failed = next(event for event in process.events if event["event"] == "start failed")
        assert failed["error"] == "as planned"
        assert "RuntimeError" in failed["exception"]
