"""What a stream to a peer asks of the link that owns it, and the times it keeps.

Implemented by orchestrator.verifier_link and orchestrator.drafter_link, called by orchestrator.peer_stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc

from paceline.v1 import peer_pb2

SentT = TypeVar("SentT", covariant=True)
ReceivedT = TypeVar("ReceivedT", contravariant=True)


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """Times of a stream, in seconds.

    Attributes:
        connect_timeout_s: longest wait for Describe, and for the peer's hello.
        lease_s: a peer that gets no frame for this long frees the sequences that were opened on the stream.
        heartbeat_s: an empty frame is sent after this long without another frame.
        silence_s: a peer whose answer is overdue by more counts as hung.
        min_backoff_s: pause after the first failed attempt; it doubles.
        max_backoff_s: longest pause.
    """

    connect_timeout_s: float = 3.0
    lease_s: float = 15.0
    heartbeat_s: float = 3.0
    silence_s: float = 10.0
    min_backoff_s: float = 0.1
    max_backoff_s: float = 2.0


class PeerLink(Protocol[SentT, ReceivedT]):
    """The owner of a stream: it knows what the frames mean."""

    async def describe(self, channel: grpc.aio.Channel, timeout_s: float) -> peer_pb2.PeerInfo:
        """Asks the peer who it is."""
        ...

    def check(self, info: peer_pb2.PeerInfo) -> None:
        """Raises IncompatiblePeerError for a peer that must not be used."""
        ...

    def call(self, channel: grpc.aio.Channel) -> Any:
        """Starts the stream call."""
        ...

    def hello(self, hello: peer_pb2.StreamHello) -> SentT:
        """First frame."""
        ...

    def hello_of(self, frame: ReceivedT) -> peer_pb2.PeerInfo | None:
        """The peer's hello, if the frame carries it."""
        ...

    def take(self, is_heartbeat_due: bool) -> SentT | None:
        """The pending frame, or an empty one where a heartbeat is due, or None."""
        ...

    def silent_for(self, now: float) -> float:
        """Seconds since the peer should have answered; 0 while no answer is due."""
        ...

    def went_up(self, info: peer_pb2.PeerInfo) -> None:
        """The stream is open."""
        ...

    def went_down(self, reason: str) -> None:
        """The stream was open and has ended."""
        ...

    def received(self, frame: ReceivedT) -> None:
        """A frame came in."""
        ...
