"""What a conductor tells the director and the orchestrator process about itself.

A plain picklable value: it travels through Ray. Knows nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConductorStatus:
    """State of one conductor at one moment.

    Attributes:
        endpoint: host:port of its ConductorService.
        verifier_endpoint: the verifier it conducts.
        is_ready: the verifier's stream is open.
        is_draining: it takes nothing new.
        num_running: unfinished sequences.
        placement: "colocated", "separate" or "none".
        verifier: the verifier's PeerInfo, serialised; empty before the first connection.
        drafters: PeerInfo of every drafter that is up, serialised.
        reason: why it is not ready; empty while it is.
        counters: figures since the conductor started.
    """

    endpoint: str
    verifier_endpoint: str
    is_ready: bool
    is_draining: bool
    num_running: int
    placement: str
    verifier: bytes = b""
    drafters: tuple[bytes, ...] = ()
    reason: str = ""
    counters: dict[str, int] = field(default_factory=dict)
