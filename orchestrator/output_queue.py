"""The output queue between a sequence and its Run stream.

Responsible for: handing committed tokens to a reader that may be slower than the target. Tokens that wait are merged,
so a queue never holds more than one request's own tokens. Deliberately does not know gRPC. Filled by
orchestrator.step_handler and orchestrator.sequence_lifecycle, emptied by orchestrator.servicer; one reader only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.contract.errors import PacelineError
from paceline.v1 import sampling_pb2
from services.runtime.log_probs import join_log_probs


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ended.

    Attributes:
        finish_reason: never unspecified.
        error: what went wrong; None unless it ended with an error.
    """

    finish_reason: sampling_pb2.FinishReason
    error: PacelineError | None = None


@dataclass(slots=True)
class Output:
    """What a reader takes at once.

    Attributes:
        tokens: committed since the last time.
        log_probs: those of these tokens; empty where the request asked for none.
        prompt_log_probs: those of the next prompt tokens.
        ending: set with the last output.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: sampling_pb2.LogProbs = field(default_factory=sampling_pb2.LogProbs)
    prompt_log_probs: sampling_pb2.LogProbs = field(default_factory=sampling_pb2.LogProbs)
    ending: Ending | None = None


class OutputQueue:
    """Tokens on their way to one reader, then exactly one ending.

    Args:
        interval: number of tokens that wakes the reader; the first tokens and the ending wake it at once.
    """

    def __init__(self, interval: int = 1) -> None:
        self._interval = interval
        self._has_begun = False
        self._output = Output()
        self._ending: Ending | None = None
        self._filled = asyncio.Event()

    def put(self, tokens: Seq[int], log_probs: sampling_pb2.LogProbs | None = None) -> None:
        """Adds tokens without waking the reader; `wake` does that once the drafters have been served."""
        self._output.tokens.extend(tokens)
        if log_probs is not None:
            join_log_probs(self._output.log_probs, log_probs)

    def put_prompt(self, log_probs: sampling_pb2.LogProbs) -> None:
        """Adds log-probabilities of the prompt, which the reader gets with the first tokens at the latest."""
        join_log_probs(self._output.prompt_log_probs, log_probs)

    def end(self, ending: Ending) -> None:
        """Sets the ending; a later one changes nothing."""
        if self._ending is None:
            self._ending = ending

    def wake(self) -> None:
        """Lets the reader run, if there is enough for it."""
        has_enough = len(self._output.tokens) >= self._interval or not self._has_begun
        if has_enough or self._ending is not None:
            self._filled.set()

    async def take(self) -> Output:
        """Waits for something, then takes all of it."""
        await self._filled.wait()
        self._filled.clear()
        output, self._output = self._output, Output()
        self._has_begun = self._has_begun or bool(output.tokens)
        output.ending = self._ending
        return output
