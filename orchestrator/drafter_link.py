"""The link to one drafter.

Responsible for: merging openings, closings, commits and plan into frames, numbering frames, measuring round trips at
its own clock, and noticing a drafter whose answer is overdue. Deliberately does not know requests: it calls
`DrafterEvents`, implemented by orchestrator.draft_dispatcher. Nothing here ever waits for the drafter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from orchestrator.peer_link import StreamTiming
from orchestrator.peer_stream import PeerStream
from paceline.contract.policy import StepPolicy
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, peer_pb2
from services.runtime.tls import Tls

STALL_S = 0.25
"""Steps no longer wait for the drafts of a drafter whose answer is overdue by more."""


class DrafterEvents(Protocol):
    """What the owner of the link reacts to."""

    def check_drafter(self, info: peer_pb2.PeerInfo) -> None:
        """Raises IncompatiblePeerError for a drafter that cannot serve the target."""
        ...

    def drafter_up(self, link: DrafterLink) -> None:
        """The stream is open; nothing is open on it."""
        ...

    def drafter_down(self, link: DrafterLink, reason: str) -> None:
        """The stream is gone, and with it every sequence on it."""
        ...

    def drafter_frame(
        self, link: DrafterLink, frame: drafter_pb2.DraftResponse, round_trip_us: int | None
    ) -> None:
        """A frame came in.

        Args:
            link: where it came in.
            frame: the answer.
            round_trip_us: there and back without the drafter's own time, microseconds; None where the frame answers
                no frame of ours.
        """
        ...


class DrafterLink:
    """One drafter.

    Attributes:
        endpoint: host:port.
        info: identity, from the last connection; None before the first.
        num_sequences: sequences open there.
    """

    def __init__(
        self,
        endpoint: str,
        events: DrafterEvents,
        *,
        client_id: str,
        timing: StreamTiming,
        tls: Tls | None,
        clock: Callable[[], float],
    ) -> None:
        self.endpoint = endpoint
        self.info: peer_pb2.PeerInfo | None = None
        self._events = events
        self._clock = clock
        self._pending = drafter_pb2.DraftRequest()
        self._is_pending = False
        self._open_ids: set[int] = set()
        self._num_frames = 0
        self._sent_at: OrderedDict[int, float] = OrderedDict()
        self._stream: PeerStream[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse] = PeerStream(
            endpoint, self, client_id=client_id, role="drafter", timing=timing, tls=tls
        )

    @property
    def is_up(self) -> bool:
        """Whether the stream is open."""
        return self._stream.is_up

    @property
    def num_sequences(self) -> int:
        """Sequences open there."""
        return len(self._open_ids)

    @property
    def is_stalled(self) -> bool:
        """Whether its answer is overdue by more than drafts are worth waiting for."""
        return self.silent_for(self._clock()) > STALL_S

    @property
    def reads_features(self) -> bool:
        """Whether its method needs the target's features."""
        return self.info is not None and self.info.tap.width > 0

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        await self._stream.run()

    def drop(self, reason: str) -> None:
        """Ends the stream; the drafter is checked anew before it is used again."""
        self._stream.drop(reason)

    # Messages to the drafter; all return at once.

    def open(self, opening: drafter_pb2.OpenDraftSequence) -> None:
        """Opens a sequence; it replaces one with the same id."""
        self._open_ids.add(opening.sequence_id)
        self._pending.opens.append(opening)
        self._flush()

    def close(self, sequence_id: int) -> None:
        """Closes a sequence; a no-op on a stream that is down, since its end ended everything."""
        if sequence_id not in self._open_ids:
            return
        self._open_ids.discard(sequence_id)
        kept = [opening for opening in self._pending.opens if opening.sequence_id != sequence_id]
        if len(kept) != len(self._pending.opens):
            del self._pending.opens[:]
            self._pending.opens.extend(kept)
        self._pending.closes.append(sequence_id)
        self._flush()

    def commit(self, commits: peer_pb2.CommitBatch) -> None:
        """Forwards commits, with the drafter's epochs."""
        if self._pending.HasField("commits"):
            self._pending.commits.MergeFrom(commits)
        else:
            self._pending.commits.CopyFrom(commits)
        self._flush()

    def set_policy(self, policy: StepPolicy) -> None:
        """Replaces the policy."""
        if self.is_up:
            self._pending.policy.CopyFrom(policy.to_proto())
            self._flush()

    def _flush(self) -> None:
        self._is_pending = True
        self._stream.wake()

    # The stream's side: PeerLink.

    async def describe(self, channel: grpc.aio.Channel, timeout_s: float) -> peer_pb2.PeerInfo:
        """Asks the drafter who it is."""
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        response = await stub.Describe(drafter_pb2.DrafterServiceDescribeRequest(), timeout=timeout_s)
        info: peer_pb2.PeerInfo = response.info
        return info

    def check(self, info: peer_pb2.PeerInfo) -> None:
        """Refuses a drafter made for another target."""
        self._events.check_drafter(info)

    def call(self, channel: grpc.aio.Channel) -> Any:
        """Starts the Draft call."""
        return drafter_pb2_grpc.DrafterServiceStub(channel).Draft()

    def hello(self, hello: peer_pb2.StreamHello) -> drafter_pb2.DraftRequest:
        """First frame; it drops what was pending for an earlier stream."""
        self._reset()
        return drafter_pb2.DraftRequest(hello=hello)

    def hello_of(self, frame: drafter_pb2.DraftResponse) -> peer_pb2.PeerInfo | None:
        """The drafter's hello."""
        return frame.hello if frame.HasField("hello") else None

    def take(self, is_heartbeat_due: bool) -> drafter_pb2.DraftRequest | None:
        """The pending frame, numbered."""
        if not self._is_pending and not is_heartbeat_due:
            return None
        frame, self._pending = self._pending, drafter_pb2.DraftRequest()
        self._is_pending = False
        self._num_frames += 1
        frame.frame_id = self._num_frames
        self._sent_at[frame.frame_id] = self._clock()
        return frame

    def silent_for(self, now: float) -> float:
        """Every frame is answered, so the silence is the age of the oldest frame without an answer."""
        oldest = next(iter(self._sent_at.values()), None)
        return 0.0 if oldest is None else now - oldest

    def went_up(self, info: peer_pb2.PeerInfo) -> None:
        """Passes the event on."""
        self.info = info
        self._events.drafter_up(self)

    def went_down(self, reason: str) -> None:
        """Passes the event on."""
        self._reset()
        self._events.drafter_down(self, reason)

    def received(self, frame: drafter_pb2.DraftResponse) -> None:
        """Passes the event on with the round trip. An answer answers all frames up to the one it names."""
        sent_at = self._sent_at.get(frame.frame_id) if frame.frame_id else None
        round_trip_us = None
        if sent_at is not None:
            elapsed_us = int((self._clock() - sent_at) * 1e6)
            round_trip_us = max(elapsed_us - frame.queue_us - frame.draft_us, 0)
            while self._sent_at and next(iter(self._sent_at)) <= frame.frame_id:
                self._sent_at.popitem(last=False)
        self._events.drafter_frame(self, frame, round_trip_us)

    def _reset(self) -> None:
        self._pending = drafter_pb2.DraftRequest()
        self._is_pending = False
        self._open_ids.clear()
        self._sent_at.clear()
