"""One conductor's Verify stream as the step loop sees it: a queue of frames."""

from __future__ import annotations

import asyncio
import itertools

from paceline.v1 import target_pb2
from services.runtime.outbox import Outbox

MAX_FRAMES = 4096

_numbers = itertools.count(1)


class VerifySession(Outbox[target_pb2.VerifyResponse]):
    """One stream.

    Attributes:
        number: for logs.
        openings: tasks of sequences whose grammar is still being compiled; the servicer owns them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, client_id: str) -> None:
        super().__init__(loop, MAX_FRAMES)
        self.number = next(_numbers)
        self.client_id = client_id
        self.openings: set[asyncio.Task[None]] = set()
