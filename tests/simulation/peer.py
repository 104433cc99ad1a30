"""One verifier of a world, and what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.methods.drafter import Drafter
from paceline.target import TargetEngine
from services.verifier.colocated import ColocatedDrafter
from tests.simulation.kit import Placement
from tests.simulation.request import Request
from tests.simulation.verifier import ListedSession, ListedSubscriber, SteppedVerifier


@dataclass
class Peer:
    """A verifier with its placement, its stream, and the drafter that follows it from elsewhere.

    Attributes:
        followed: open requests by the verifier's sequence id.
    """

    verifier: SteppedVerifier
    placement: Placement
    session: ListedSession
    subscriber: ListedSubscriber
    remote: Drafter | None
    followed: dict[int, Request] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        engine: TargetEngine,
        drafter: Drafter | None,
        placement: Placement,
        prefix_bytes: int,
        ngram_tokens: int,
    ) -> Peer:
        """A verifier whose drafter is where the placement says."""
        is_colocated = placement.startswith("colocated")
        verifier = SteppedVerifier(
            engine,
            drafter=ColocatedDrafter(drafter) if is_colocated and drafter is not None else None,
            prefix_cache_bytes=prefix_bytes,
            ngram_tokens=ngram_tokens,
        )
        subscriber = ListedSubscriber("drafter")
        verifier.features.subscribe(subscriber)
        return cls(verifier, placement, ListedSession(), subscriber, None if is_colocated else drafter)

    def unfollow(self, request: Request) -> None:
        """Forget a request, here and at the drafter."""
        self.followed.pop(request.sequence_id, None)
        if self.remote is not None:
            self.remote.close(request.sequence_id)
