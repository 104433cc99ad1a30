"""Clients of a Paceline deployment: :class:`PacelineClient` and :class:`AsyncPacelineClient`.

Responsible for: what applications import. Deliberately does not know: servers, tokenisers, torch.
"""

from paceline.client.aio import AsyncPacelineClient
from paceline.client.blocking import PacelineClient
from paceline.client.events import (
    Chunk,
    Completion,
    Event,
    Finished,
    ModelInfo,
    PromptLogProbs,
    Started,
    Stats,
)
from paceline.client.failed_call import OverloadedError, ServerError
from paceline.client.log_probs import TokenLogProb
from paceline.client.requests import Message, Prompt
from paceline.client.retry import RetryPolicy
from paceline.contract.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    PacelineError,
    UnavailableError,
)

__all__ = [
    "AsyncPacelineClient",
    "CapacityError",
    "Chunk",
    "Completion",
    "DeadlineError",
    "Event",
    "Finished",
    "InvalidRequestError",
    "Message",
    "ModelInfo",
    "OverloadedError",
    "PacelineClient",
    "PacelineError",
    "Prompt",
    "PromptLogProbs",
    "RetryPolicy",
    "ServerError",
    "Started",
    "Stats",
    "TokenLogProb",
    "UnavailableError",
]
