"""Errors that a caller can act on.

Every error that crosses a process edge derives from PacelineError and knows its gRPC status, so that one
interceptor (services.runtime.error_mapping) maps all of them. This file knows nothing of gRPC itself: statuses are
names.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors with a meaning for the caller.

    Attributes:
        status: name of the gRPC status code this error becomes at a process edge.
        reason: machine-readable cause in capitals, stable across versions.
    """

    status = "INTERNAL"
    reason = "INTERNAL"


class InvalidRequestError(PacelineError, ValueError):
    """A request field that cannot be honoured; names the field."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class IncompatiblePeerError(PacelineError):
    """A drafter made for another target, or a peer that speaks another protocol version."""

    status = "FAILED_PRECONDITION"
    reason = "INCOMPATIBLE_PEER"


class TokenizerError(PacelineError):
    """The model directory's tokenizer or chat template cannot be used."""

    status = "FAILED_PRECONDITION"
    reason = "UNUSABLE_TOKENIZER"


class CapacityError(PacelineError):
    """No room for another sequence now; trying again later may work."""

    status = "RESOURCE_EXHAUSTED"
    reason = "CAPACITY_EXHAUSTED"


class UnavailableError(PacelineError):
    """A peer that is needed cannot be reached."""

    status = "UNAVAILABLE"
    reason = "PEER_UNAVAILABLE"


class DrainingError(UnavailableError):
    """The process is shutting down and admits nothing new."""

    reason = "DRAINING"


class UnknownSequenceError(PacelineError):
    """A sequence id that this process does not hold (any more)."""

    status = "NOT_FOUND"
    reason = "UNKNOWN_SEQUENCE"


class StreamProtocolError(PacelineError):
    """A stream whose frames break the protocol, such as one without a hello."""

    status = "FAILED_PRECONDITION"
    reason = "BAD_FRAME"


class TrainingError(PacelineError):
    """Making data or training stopped for a reason that the user can act on."""

    reason = "TRAINING_STOPPED"


class TrainingDataError(TrainingError):
    """A model directory, shard, manifest or checkpoint that training reads has wrong content."""


class ExportRefusedError(TrainingError):
    """The current weights must not be served; the message says why. Training continues."""

    reason = "EXPORT_REFUSED"
