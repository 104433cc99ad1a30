"""Errors with a meaning for the caller.

Every error that crosses a process edge derives from `PacelineError` and names its gRPC status. One interceptor
(services.runtime.error_mapping) maps all of them. This file does not know gRPC: a status is a name of
`paceline.contract.failures.StatusCode`.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors with a meaning for the caller.

    Attributes:
        status: name of the gRPC status code that this error becomes at a process edge.
        reason: machine-readable cause in capitals, stable across versions.
    """

    status = "INTERNAL"
    reason = "INTERNAL"


class InvalidRequestError(PacelineError, ValueError):
    """A field of a request has a value that cannot be honoured.

    Attributes:
        field: path of the field, such as ``sampling.logit_bias[50000]``.
        description: what is wrong with its value.
    """

    status = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description

    def inside(self, message: str) -> InvalidRequestError:
        """The same error, with the field's path extended by the message that holds the field."""
        return InvalidRequestError(f"{message}.{self.field}", self.description)


class IncompatiblePeerError(PacelineError):
    """A drafter was made for another target, or a peer speaks another protocol version."""

    status = "FAILED_PRECONDITION"
    reason = "INCOMPATIBLE_PEER"


class TokenizerError(PacelineError):
    """The tokenizer or the chat template of the model directory cannot be used."""

    status = "FAILED_PRECONDITION"
    reason = "UNUSABLE_TOKENIZER"


class CapacityError(PacelineError):
    """There is no room for another sequence now; a later attempt may find room."""

    status = "RESOURCE_EXHAUSTED"
    reason = "CAPACITY_EXHAUSTED"


class DeadlineError(PacelineError):
    """The time given to a call is over, or too short to do the work."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class UnavailableError(PacelineError):
    """A peer that is needed cannot be reached."""

    status = "UNAVAILABLE"
    reason = "PEER_UNAVAILABLE"


class DrainingError(UnavailableError):
    """The process shuts down and admits nothing new."""

    reason = "DRAINING"


class StreamProtocolError(PacelineError):
    """A frame breaks the protocol of its stream, for example a first frame without a hello."""

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


class IllegalTransitionError(RuntimeError):
    """A transition table does not allow this change of state: a bug in our own code. It never crosses an edge."""
