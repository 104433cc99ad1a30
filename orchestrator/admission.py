"""Which conductor takes a request.

Responsible for: the choice (the fewest running sequences, among those that are ready and have room) and the checks
that can be made before a request reaches a conductor. Pure; deliberately does not know Ray or gRPC. Used by
orchestrator.director.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator.status import ConductorStatus
from paceline.contract.errors import CapacityError, InvalidRequestError, UnavailableError
from paceline.v1 import peer_pb2


class Admission:
    """The conductors' last statuses, and what was placed since."""

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._statuses: dict[str, ConductorStatus] = {}
        self._placed: Counter[str] = Counter()

    @property
    def statuses(self) -> Sequence[ConductorStatus]:
        """Last status of every conductor that has reported, in order of its verifier's endpoint."""
        return [self._statuses[endpoint] for endpoint in sorted(self._statuses)]

    def update(self, status: ConductorStatus) -> None:
        """Notes a fresh status; it counts what was placed before it."""
        self._statuses[status.verifier_endpoint] = status
        self._placed[status.verifier_endpoint] = 0

    def lose(self, verifier_endpoint: str) -> None:
        """Notes that a conductor does not answer."""
        self._statuses.pop(verifier_endpoint, None)
        self._placed[verifier_endpoint] = 0

    def place(self, num_prompt_tokens: int, max_new_tokens: int) -> str:
        """Chooses the conductor for a request and returns its endpoint.

        Raises:
            InvalidRequestError: the request fits no verifier.
            UnavailableError: no conductor is ready.
            CapacityError: all that are ready are full.
        """
        if num_prompt_tokens < 1:
            raise InvalidRequestError("num_prompt_tokens", "must be at least 1")
        if max_new_tokens < 1:
            raise InvalidRequestError("max_new_tokens", "must be at least 1")
        ready = [status for status in self._statuses.values() if status.is_ready]
        if not ready:
            reasons = "; ".join(f"{status.verifier_endpoint}: {status.reason}" for status in self.statuses)
            raise UnavailableError(f"no verifier is reached ({reasons or 'no conductor has reported yet'})")
        num_positions = num_prompt_tokens + max_new_tokens
        roomy = [status for status in ready if num_positions <= _max_positions(status)]
        if not roomy:
            most = max(_max_positions(status) for status in ready)
            raise InvalidRequestError(
                "max_new_tokens", f"{num_positions} positions are asked for, the model has {most}"
            )
        best = min(roomy, key=self._load)
        if self._load(best) >= self._max_sequences:
            raise CapacityError(f"all conductors run {self._max_sequences} requests")
        self._placed[best.verifier_endpoint] += 1
        return best.endpoint

    def _load(self, status: ConductorStatus) -> int:
        return status.num_running + self._placed[status.verifier_endpoint]


def _max_positions(status: ConductorStatus) -> int:
    return peer_pb2.PeerInfo.FromString(status.verifier).max_positions
