"""Ending background tasks reliably.

Responsible for: cancelling a task until it has ended. Deliberately does not know: what the task does.
"""

from __future__ import annotations

import asyncio
from typing import Any

_PATIENCE_S = 0.2


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended, whatever its result.

    One cancellation may not be enough: before Python 3.12 ``asyncio.wait_for`` swallows a cancellation that
    arrives at the moment when the awaited call is done, and libraries use it (redis does, when it sends).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=_PATIENCE_S)
    if not task.cancelled():
        task.exception()  # retrieves the exception, so that asyncio does not warn about it
