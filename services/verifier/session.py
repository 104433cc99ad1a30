"""One conductor's Verify stream as the step loop sees it: somewhere to put frames.

Knows nothing of what the frames say. The loop pushes from its thread, the servicer pops on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools

from paceline.v1 import target_pb2

_numbers = itertools.count(1)


class Session:
    """A stream's outgoing frames.

    A conductor that does not read is cut off: the queue is bounded, so that a slow reader costs a bounded amount of
    memory and never holds up a step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, client_id: str, max_frames: int = 4096) -> None:
        self.number = next(_numbers)
        self.client_id = client_id
        self._loop = loop
        self._frames: asyncio.Queue[target_pb2.VerifyResponse | None] = asyncio.Queue(max_frames)
        self.is_overrun = False

    def push(self, frame: target_pb2.VerifyResponse) -> None:
        """Queue a frame from any thread; never blocks."""
        self._loop.call_soon_threadsafe(self._put, frame)

    def end(self) -> None:
        """Let the writer finish once all frames are out; from the event loop's thread."""
        self._put(None)

    def _put(self, frame: target_pb2.VerifyResponse | None) -> None:
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self.is_overrun = True

    async def pop(self) -> target_pb2.VerifyResponse | None:
        """Next frame; None at the end."""
        return await self._frames.get()
