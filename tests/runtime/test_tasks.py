"""Ending tasks."""

from __future__ import annotations

import asyncio

import pytest

from services.runtime.tasks import end_task

pytestmark = pytest.mark.asyncio


async def test_a_task_that_swallows_cancellations_is_ended_all_the_same() -> None:
    num_swallowed = 0

    async def stubborn() -> None:
        nonlocal num_swallowed
        while num_swallowed < 2:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                num_swallowed += 1
        await asyncio.sleep(3600)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_task(task), 10)
    assert task.cancelled()
    assert num_swallowed == 2


async def test_a_failed_task_is_ended_quietly() -> None:
    async def failing() -> None:
        raise RuntimeError("as planned")

    task = asyncio.create_task(failing())
    await asyncio.sleep(0)
    await end_task(task)
    assert task.done()
