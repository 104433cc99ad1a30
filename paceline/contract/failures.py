"""Status codes and reasons of a failed sequence.

A stream carries many sequences. One that fails is reported in a `SequenceFailure` message, with the status code that
a unary call would have had and with a reason. This file holds both; `paceline.contract.errors` holds the errors of
whole calls, and services.runtime.error_mapping maps those to gRPC.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class StatusCode(IntEnum):
    """gRPC's status codes by number, without OK."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class FailureReason(StrEnum):
    """Why one sequence failed at a verifier or a drafter. A reason may also be the reason of a `PacelineError`."""

    INVALID_FIELD = "INVALID_FIELD"
    """A field of its opening cannot be honoured; the message names the field."""
    INCOMPATIBLE_PEER = "INCOMPATIBLE_PEER"
    """The verifier does not offer the features that the drafter reads."""
    CAPACITY_EXHAUSTED = "CAPACITY_EXHAUSTED"
    """The process holds as many sequences as it may."""
    KV_CACHE_EXHAUSTED = "KV_CACHE_EXHAUSTED"
    """Its tokens do not fit into the KV cache."""
    OUT_OF_POSITIONS = "OUT_OF_POSITIONS"
    """Its text is longer than the drafter's positions. The text continues without this drafter."""
    COMMIT_GAP = "COMMIT_GAP"
    """A commit starts after the last token that the drafter knows."""
    DRAFT_FAILED = "DRAFT_FAILED"
    """The drafter raised an error for it."""
    FEATURES_LOST = "FEATURES_LOST"
    """The target's features for it are malformed, or did not arrive in time."""


RETRIABLE_CODES = frozenset(
    {
        StatusCode.ABORTED,
        StatusCode.INTERNAL,
        StatusCode.NOT_FOUND,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.UNAVAILABLE,
    }
)
"""A sequence that failed at the verifier with one of these is opened again."""

DRAFTING_ENDS = frozenset(
    {FailureReason.OUT_OF_POSITIONS, FailureReason.INCOMPATIBLE_PEER, FailureReason.INVALID_FIELD}
)
"""A sequence that failed at a drafter for one of these reasons is not given to a drafter again."""
