"""A server in the event loop of a test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from services.runtime.lifecycle import Build
from services.runtime.process import Process
from services.runtime.settings import ServerSettings


@contextlib.asynccontextmanager
async def hosted(role: str, settings: ServerSettings, build: Build) -> AsyncIterator[Process]:
    """Run a process's server within the current event loop, without signals."""
    process = Process(role, settings)
    try:
        await build(process)
        await process.start()
        yield process
    finally:
        await process.shutdown()
