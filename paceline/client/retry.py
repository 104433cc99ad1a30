"""When a request is retried, and after which pause.

Responsible for: the decision. Deliberately does not know: calls, clocks; randomness is passed in. Called by the
two clients. Only a request that has returned no event is ever retried, and no other layer retries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.client.failed_call import OverloadedError
from paceline.contract.errors import CapacityError, PacelineError, UnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    Attributes:
        max_attempts: calls in all; 1 never retries.
        base_s: upper bound of the first pause; it doubles with every attempt.
        cap_s: upper bound of every pause.
    """

    max_attempts: int = 4
    base_s: float = 0.2
    cap_s: float = 5.0

    def pause_s(
        self,
        error: PacelineError,
        num_attempts: int,
        remaining_s: float,
        uniform: Callable[[float, float], float],
    ) -> float | None:
        """Seconds to wait before the next attempt; None for no further attempt.

        Args:
            error: the error of the last attempt.
            num_attempts: attempts so far.
            remaining_s: time left until the caller's deadline.
            uniform: draws between two bounds.
        """
        if num_attempts >= self.max_attempts or not isinstance(error, UnavailableError | CapacityError):
            return None
        pause = uniform(0.0, min(self.cap_s, self.base_s * 2.0 ** (num_attempts - 1)))
        if isinstance(error, OverloadedError) and error.retry_after_s is not None:
            pause += error.retry_after_s
        return pause if pause < remaining_s else None
