"""Several streams of events merged into one, in the order in which events arrive.

Responsible for: running the choices of a request together, ending with the first that fails, and ending all of
them when the reader disconnects. Deliberately does not know: what an event is.

Called by: :mod:`services.gateway.servicer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

_EVENTS_PER_STREAM = 16
"""Events that wait for a slow reader. Beyond them the streams stop reading, and the conductors merge tokens."""


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the events of all streams until all have ended; closing it closes them.

    Raises:
        Exception: the error of the first stream that failed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield event
        return
    queue: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(_EVENTS_PER_STREAM * len(streams))

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    await queue.put((event,))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item[0]
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
