"""Which conductor gets a request.

Responsible for: the choice (the fewest running sequences among the conductors that are ready and below their limit) and
the checks that can be made before a request reaches a conductor. Pure; deliberately does not know Ray or gRPC. Used by
orchestrator.director.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator.status import ConductorStatus
from paceline.contract.errors import CapacityError, InvalidRequestError, UnavailableError
from paceline.v1 import peer_pb2


class Admission:
    """The conductors' last statuses, and the requests assigned since."""

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._statuses: dict[str, ConductorStatus] = {}
        self._num_assigned: Counter[str] = Counter()

    @property
    def statuses(self) -> Sequence[ConductorStatus]:
        """Last status of every conductor that has reported, in order of the verifiers' endpoints."""
        return [self._statuses[endpoint] for endpoint in sorted(self._statuses)]

    def update(self, status: ConductorStatus) -> None:
        """Stores a new status; it counts the requests that were assigned before it."""
        self._statuses[status.verifier_endpoint] = status
        self._num_assigned[status.verifier_endpoint] = 0

    def lose(self, verifier_endpoint: str) -> None:
        """Forgets a conductor that does not answer."""
        self._statuses.pop(verifier_endpoint, None)
        self._num_assigned[verifier_endpoint] = 0

    def assign(self, num_prompt_tokens: int, max_new_tokens: int) -> str:
        """Assigns a request to a conductor and returns the conductor's endpoint.

        Raises:
            InvalidRequestError: the request fits no verifier.
            UnavailableError: no conductor is ready.
            CapacityError: every ready conductor is at its limit.
        """
        if num_prompt_tokens < 1:
            raise InvalidRequestError("num_prompt_tokens", "must be at least 1")
        if max_new_tokens < 1:
            raise InvalidRequestError("max_new_tokens", "must be at least 1")
        ready = [status for status in self._statuses.values() if status.is_ready]
        if not ready:
            reasons = "; ".join(f"{status.verifier_endpoint}: {status.reason}" for status in self.statuses)
            raise UnavailableError(
                f"no verifier can be reached ({reasons or 'no conductor has reported yet'})"
            )
        num_positions = num_prompt_tokens + max_new_tokens
        fitting = [status for status in ready if num_positions <= _max_positions(status)]
        if not fitting:
            most = max(_max_positions(status) for status in ready)
            raise InvalidRequestError(
                "max_new_tokens", f"prompt and text need {num_positions} positions, the model has {most}"
            )
        best = min(fitting, key=self._load)
        if self._load(best) >= self._max_sequences:
            raise CapacityError(f"every conductor runs {self._max_sequences} requests, its limit")
        self._num_assigned[best.verifier_endpoint] += 1
        return best.endpoint

    def _load(self, status: ConductorStatus) -> int:
        return status.num_running + self._num_assigned[status.verifier_endpoint]


def _max_positions(status: ConductorStatus) -> int:
    return peer_pb2.PeerInfo.FromString(status.verifier).max_positions
