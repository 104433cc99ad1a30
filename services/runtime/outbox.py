"""Frames on their way to one stream's reader, from a thread that must not wait for it.

Responsible for: handing frames from a compute thread to the event loop, in order and bounded. A reader that
does not keep up is marked and disconnected: it costs a bounded amount of memory and never delays a step.
Deliberately does not know: what the frames say. Called by: verifier and drafter, for every stream that their
threads write to.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

FrameT = TypeVar("FrameT")


class Outbox(Generic[FrameT]):
    """A bounded queue from any thread to one reader on the event loop.

    Attributes:
        is_overrun: whether the reader was too slow and has lost frames; its stream must be ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_frames: int) -> None:
        self.is_overrun = False
        self._loop = loop
        self._frames: asyncio.Queue[FrameT | None] = asyncio.Queue(max_frames)

    def push(self, frame: FrameT) -> None:
        """Queue a frame from any thread; never blocks."""
        self._loop.call_soon_threadsafe(self.put, frame)

    def end(self) -> None:
        """Let the reader finish after all queued frames; called on the event loop's thread."""
        self.put(None)

    def put(self, frame: FrameT | None) -> None:
        """Queue a frame, or the end, on the event loop's thread."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self.is_overrun = True

    async def pop(self) -> FrameT | None:
        """Next frame; None at the end."""
        return await self._frames.get()
