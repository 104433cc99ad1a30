"""Where drafting happens: the placement in force, and the drafter of a sequence.

Responsible for: these two choices, and the comparison of a drafter with its target. Deliberately does not know
streams. Used by orchestrator.conductor and orchestrator.cycles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from paceline import PROTOCOL_VERSION
from paceline.contract.errors import IncompatiblePeerError
from paceline.contract.fields import can_use_features
from paceline.v1 import peer_pb2, sampling_pb2

Placement = Literal["colocated", "separate", "none"]
PlacementSetting = Literal["auto", "colocated", "separate", "none"]


class Candidate(Protocol):
    """A drafter as the choice sees it."""

    @property
    def is_up(self) -> bool:
        """Its stream is open."""
        ...

    @property
    def is_stalled(self) -> bool:
        """An answer is overdue."""
        ...

    @property
    def num_sequences(self) -> int:
        """Sequences of this conductor that it has open."""
        ...

    @property
    def endpoint(self) -> str:
        """host:port."""
        ...

    @property
    def info(self) -> peer_pb2.PeerInfo | None:
        """Its identity, from the last connection; None before the first."""
        ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


def placement_in_force(
    setting: PlacementSetting, drafters: Sequence[str], verifier: peer_pb2.PeerInfo | None
) -> Placement:
    """Resolve "auto": the configured drafters if there are any, else the verifier's own, else none."""
    if setting != "auto":
        return setting
    if drafters:
        return "separate"
    return "colocated" if verifier is not None and verifier.method else "none"


@dataclass(frozen=True, slots=True)
class DrafterRequirement:
    """What a request asks of its drafter.

    Attributes:
        name: the name, method or endpoint that the drafter must have; empty takes any.
        reads_features: whether it must read the target's features; None leaves that to its method.
    """

    name: str = ""
    reads_features: bool | None = None

    @classmethod
    def read(cls, options: sampling_pb2.SpeculationOptions) -> DrafterRequirement:
        """The requirement of a request."""
        reads = options.reads_features if options.HasField("reads_features") else None
        return cls(options.drafter, reads)

    def is_met_by(self, candidate: Candidate) -> bool:
        """Whether a drafter meets the requirement. One that has not been reached yet may meet any."""
        info = candidate.info
        return is_called(candidate, self.name) and (info is None or can_do(info, self.reads_features))


ANY_DRAFTER = DrafterRequirement()


def choose_drafter(
    candidates: Iterable[CandidateT], requirement: DrafterRequirement = ANY_DRAFTER
) -> CandidateT | None:
    """The drafter that is up and has the fewest sequences; a stalled one only if there is no other.

    Args:
        candidates: drafters to choose from.
        requirement: what the drafter must be able to do.
    """
    usable = [candidate for candidate in candidates if candidate.is_up and requirement.is_met_by(candidate)]
    return min(usable, key=lambda candidate: (candidate.is_stalled, candidate.num_sequences), default=None)


def is_called(candidate: Candidate, wanted: str) -> bool:
    """Whether a drafter has a name, method or endpoint; any drafter has the empty name."""
    info = candidate.info
    names = {candidate.endpoint} if info is None else {candidate.endpoint, info.drafter_name, info.method}
    return not wanted or wanted in names


def can_do(info: peer_pb2.PeerInfo, reads_features: bool | None) -> bool:
    """Whether a drafter can draft with the target's features, or without them, as the request wants."""
    return can_use_features(reads_features, has_tap=info.tap.width > 0, is_tap_optional=info.tap.is_optional)


def check_protocol(info: peer_pb2.PeerInfo) -> None:
    """Refuses a peer that speaks another version of the frames.

    Raises:
        IncompatiblePeerError: naming both versions.
    """
    if info.protocol_version != PROTOCOL_VERSION:
        raise IncompatiblePeerError(
            f"peer speaks protocol version {info.protocol_version}, this process {PROTOCOL_VERSION}"
        )


def check_drafter(drafter: peer_pb2.PeerInfo, verifier: peer_pb2.PeerInfo) -> None:
    """Refuses a drafter that cannot serve this target.

    Raises:
        IncompatiblePeerError: naming the field that differs.
    """
    check_protocol(drafter)
    for field in ("model_fingerprint", "tokenizer_fingerprint", "vocab_size"):
        ours, theirs = getattr(verifier, field), getattr(drafter, field)
        if ours != theirs:
            raise IncompatiblePeerError(
                f"the drafter was made for another target: its {field} is {theirs!r}, the target's {ours!r}"
            )
    tap = drafter.tap
    if tap.width and tap != verifier.tap:
        raise IncompatiblePeerError(
            f"the drafter reads features of layers {list(tap.layers)} with width {tap.width}; the verifier "
            f"offers layers {list(verifier.tap.layers)} with width {verifier.tap.width}, or another projection"
        )
