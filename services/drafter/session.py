"""One conductor's Draft stream as the draft loop sees it: its sequences, its plan, and somewhere to put answers.

The loop pushes from its thread, the servicer pops on the event loop. Knows nothing of what answers say.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from paceline.v1 import drafter_pb2
from services.drafter.sequence import DraftSequence

MAX_ANSWERS = 1024

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens per draft, tokens drafted past it while the target verifies, and nodes of a tree of that depth."""

    draft_length: int = 4
    draft_ahead: int = 0
    max_nodes: int = 0


class Session:
    """A stream.

    Attributes:
        number: for logs.
        sequences: by the verifier's id; belongs to the loop's thread.
        plan: in force; belongs to the loop's thread.
        is_overrun: the conductor does not read; the stream is to be cut off.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, client_id: str) -> None:
        self.number = next(_numbers)
        self.client_id = client_id
        self.sequences: dict[int, DraftSequence] = {}
        self.plan = Plan()
        self.is_overrun = False
        self._loop = loop
        self._answers: asyncio.Queue[drafter_pb2.DraftResponse | None] = asyncio.Queue(MAX_ANSWERS)

    def push(self, answer: drafter_pb2.DraftResponse) -> None:
        """Queues an answer from any thread; never blocks."""
        self._loop.call_soon_threadsafe(self._put, answer)

    def end(self) -> None:
        """Lets the writer finish; from the event loop's thread."""
        self._put(None)

    def _put(self, answer: drafter_pb2.DraftResponse | None) -> None:
        try:
            self._answers.put_nowait(answer)
        except asyncio.QueueFull:
            self.is_overrun = True

    async def pop(self) -> drafter_pb2.DraftResponse | None:
        """Next answer; None at the end."""
        return await self._answers.get()
