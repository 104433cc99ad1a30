"""The mailbox between the cycle and one Run stream.

Responsible for: handing committed tokens to a reader that may be slower than the target, merged, so that at most
one request's own tokens are ever held. Deliberately does not know gRPC. Filled by orchestrator.cycles, emptied by
orchestrator.servicer; one reader only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.v1 import sampling_pb2


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ended.

    Attributes:
        finish_reason: never unspecified.
        error: what went wrong, where it ended with an error.
    """

    finish_reason: sampling_pb2.FinishReason
    error: PacelineError | None = None


class Mailbox:
    """Tokens on their way to one reader, then exactly one ending."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ending: Ending | None = None
        self._filled = asyncio.Event()

    def put(self, tokens: Seq[int]) -> None:
        """Adds tokens without waking the reader; `wake` does that once the drafters have been served."""
        self._tokens.extend(tokens)

    def end(self, ending: Ending) -> None:
        """Sets the ending; the first one stands."""
        if self._ending is None:
            self._ending = ending

    def wake(self) -> None:
        """Lets the reader run."""
        self._filled.set()

    async def take(self) -> tuple[list[int], Ending | None]:
        """Waits for something, then takes all of it."""
        await self._filled.wait()
        self._filled.clear()
        tokens, self._tokens = self._tokens, []
        return tokens, self._ending
