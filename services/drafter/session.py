"""One conductor's Draft stream as the draft loop sees it: its sequences, its plan, and somewhere to put answers.

Knows nothing of what answers say.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from paceline.v1 import drafter_pb2
from services.drafter.sequence import DraftSequence
from services.runtime.outbox import Outbox

MAX_ANSWERS = 1024

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the scheduler decided.

    Attributes:
        draft_length: tokens in a row per draft.
        draft_ahead: tokens drafted past it, or past each outcome, while the target verifies.
        max_nodes: nodes of a draft; more than its length make a tree.
        outcomes: outcomes of the step under way that are drafted past; 0 goes on from the end of the draft alone.
    """

    draft_length: int = 4
    draft_ahead: int = 0
    max_nodes: int = 0
    outcomes: int = 0


class DraftSession(Outbox[drafter_pb2.DraftResponse]):
    """A stream.

    Attributes:
        number: for logs.
        sequences: by the verifier's id; belongs to the loop's thread.
        plan: in force; belongs to the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, client_id: str) -> None:
        super().__init__(loop, MAX_ANSWERS)
        self.number = next(_numbers)
        self.client_id = client_id
        self.sequences: dict[int, DraftSequence] = {}
        self.plan = Plan()
