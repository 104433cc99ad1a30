"""What one conductor works with at the moment: its placement, its drafter, and the key of its measurements.

Deliberately does not know streams or sequences. Used by orchestrator.conductor, and by its parts through functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.placement import Placement, PlacementSetting, placement_in_force
from paceline.v1 import peer_pb2, scheduler_pb2


class PeersInUse:
    """The peers in use.

    Args:
        setting: the operator's choice of placement.
        endpoints: the drafters that the operator named.
        verifier: identity of the verifier; None before it was reached.
        drafters: identities of the drafters that were reached.
    """

    def __init__(
        self,
        setting: PlacementSetting,
        endpoints: Sequence[str],
        verifier: Callable[[], peer_pb2.PeerInfo | None],
        drafters: Callable[[], Sequence[peer_pb2.PeerInfo]],
    ) -> None:
        self._setting = setting
        self._endpoints = endpoints
        self._verifier = verifier
        self._drafters = drafters

    def placement(self) -> Placement:
        """The placement in force."""
        return placement_in_force(self._setting, self._endpoints, self._verifier())

    def drafter(self) -> peer_pb2.PeerInfo | None:
        """The peer that drafts in this placement; the first of several, since all are of one kind."""
        placement = self.placement()
        if placement == "colocated":
            return self._verifier()
        return next(iter(self._drafters()), None) if placement == "separate" else None

    def longest_draft(self) -> int:
        """Most tokens in a row in one draft; 0 where only the drafter's positions bound it."""
        drafter = self.drafter()
        return 0 if drafter is None else drafter.longest_draft

    def measurement_key(self) -> scheduler_pb2.MeasurementKey | None:
        """What measurements belong to; None until the verifier, and a drafter where one is used, are known."""
        verifier, drafter, placement = self._verifier(), self.drafter(), self.placement()
        if verifier is None or (placement == "separate" and drafter is None):
            return None
        return scheduler_pb2.MeasurementKey(
            model_fingerprint=verifier.model_fingerprint,
            dtype=verifier.dtype,
            device_name=verifier.device.name,
            method="" if drafter is None else drafter.method,
            placement=placement,
        )
