"""Errors that only the gateway raises.

Responsible for: their gRPC status and reason. Deliberately does not know gRPC. Raised across this package, mapped by
the interceptor in :mod:`services.runtime.error_mapping`.
"""

from __future__ import annotations

from paceline.contract.errors import PacelineError


class DeadlineError(PacelineError):
    """The caller's deadline leaves no time to do the work."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_TOO_CLOSE"
