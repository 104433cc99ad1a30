"""Errors the target engine raises for bad input or exhausted resources.

Knows nothing of transports: services map these to status codes. Raised by every module in `paceline.target`.
"""

from __future__ import annotations

from paceline.contract.errors import CapacityError, PacelineError


class TargetError(PacelineError):
    """Base of everything the target engine raises on purpose."""


class UnknownDeviceError(TargetError):
    """The device string cannot be parsed, or the machine has no such device."""

    status = "FAILED_PRECONDITION"
    reason = "UNKNOWN_DEVICE"


class UnsupportedModelError(TargetError):
    """The checkpoint asks for something that no executor can run exactly."""

    status = "FAILED_PRECONDITION"
    reason = "UNSUPPORTED_MODEL"


class SlotError(TargetError):
    """A slot id is not open, or it is used in a way its state does not allow."""

    status = "FAILED_PRECONDITION"
    reason = "BAD_SLOT"


class StepError(TargetError):
    """The rows of a step are malformed: empty, out of range, not topological, or for one slot twice."""

    status = "INVALID_ARGUMENT"
    reason = "BAD_STEP"


class KVCacheFullError(TargetError, CapacityError):
    """Growing the cache would pass its byte limit; nothing was changed.

    Attributes:
        needed_bytes: allocation that was asked for, on top of what is in use.
        used_bytes: bytes allocated now.
        limit_bytes: the limit.
    """

    status = CapacityError.status
    reason = "KV_CACHE_FULL"

    def __init__(self, needed_bytes: int, used_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"KV cache needs {needed_bytes} more bytes, {used_bytes} of {limit_bytes} are allocated"
        )
        self.needed_bytes = needed_bytes
        self.used_bytes = used_bytes
        self.limit_bytes = limit_bytes
