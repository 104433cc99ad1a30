"""One conductor's Draft stream as the draft loop sees it: its policy and a queue of answers.

Does not know what an answer means.
"""

from __future__ import annotations

import asyncio
import itertools

from paceline.contract.policy import StepPolicy
from paceline.v1 import drafter_pb2
from services.runtime.outbox import Outbox

MAX_ANSWERS = 1024

_numbers = itertools.count(1)


class DraftSession(Outbox[drafter_pb2.DraftResponse]):
    """One stream.

    Attributes:
        number: for logs.
        policy: in force; belongs to the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, client_id: str) -> None:
        super().__init__(loop, MAX_ANSWERS)
        self.number = next(_numbers)
        self.client_id = client_id
        self.policy = StepPolicy()
