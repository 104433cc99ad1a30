"""What a conductor reports of itself to the director and the orchestrator process.

A plain picklable value, because it travels through Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConductorStatus:
    """State of one conductor at one moment.

    Attributes:
        endpoint: host:port of its ConductorService.
        verifier_endpoint: host:port of its verifier.
        is_ready: the verifier's stream is open.
        is_draining: it accepts no new request.
        num_running: unfinished sequences.
        placement: "colocated", "separate" or "none".
        verifier: the verifier's PeerInfo, serialised; empty before the first connection.
        drafters: PeerInfo of every drafter that is up, serialised.
        has_policy: the scheduler has sent a policy for the peers in use; True without a scheduler.
        reason: why it is not ready; empty while it is.
        counters: counts since the conductor started.
    """

    endpoint: str
    verifier_endpoint: str
    is_ready: bool
    is_draining: bool
    num_running: int
    placement: str
    verifier: bytes = b""
    drafters: tuple[bytes, ...] = ()
    has_policy: bool = False
    reason: str = ""
    counters: dict[str, int] = field(default_factory=dict)
