"""The link to one verifier: one Verify stream carries everything of one conductor.

Responsible for: merging openings, closings, attachments, drafts and policy into frames, and refusing a verifier that
serves another model than the one that sequences run on. Deliberately does not know requests: it calls
`VerifierEvents`, implemented by orchestrator.cycles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from orchestrator.draft_batches import join_drafts
from orchestrator.peer_link import StreamTiming
from orchestrator.peer_stream import PeerStream
from orchestrator.placement import check_protocol
from paceline.contract.errors import IncompatiblePeerError
from paceline.contract.policy import StepPolicy
from paceline.v1 import peer_pb2, target_pb2, target_pb2_grpc
from services.runtime.tls import Tls

MAX_PENDING_DRAFT_TOKENS = 16_384
"""Draft tokens kept for a verifier that does not read; more are dropped, since they would be stale when it reads."""

MAX_PENDING_SUPPORT_TOKENS = 1 << 20
"""The same for the tokens of the distributions that draft tokens were drawn from."""


class VerifierEvents(Protocol):
    """What the owner of the link reacts to."""

    def verifier_up(self, info: peer_pb2.PeerInfo) -> None:
        """The stream is open; nothing is open on it."""
        ...

    def verifier_down(self, reason: str) -> None:
        """The stream is gone, and with it every sequence on it."""
        ...

    def verifier_frame(self, frame: target_pb2.VerifyResponse) -> None:
        """A frame came in."""
        ...


class VerifierLink:
    """One verifier.

    Attributes:
        endpoint: host:port.
        feature_endpoint: host:port at which drafters reach it.
        info: identity, from the last connection; None before the first.
        profile: steps that it timed at its start; None once they were taken, or where it timed none.
        is_known: set once `info` is.
        num_dropped_draft_tokens: draft tokens that were not sent because the stream was down or blocked.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        client_id: str,
        timing: StreamTiming,
        tls: Tls | None,
        clock: Callable[[], float],
        num_running: Callable[[], int],
        feature_endpoint: str | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.feature_endpoint = feature_endpoint or endpoint
        self.info: peer_pb2.PeerInfo | None = None
        self.profile: target_pb2.StepProfile | None = None
        self.num_dropped_draft_tokens = 0
        self.is_known = asyncio.Event()
        self._events: VerifierEvents
        self._clock = clock
        self._num_running = num_running
        self._pending = target_pb2.VerifyRequest()
        self._is_pending = False
        self._last_frame_at = 0.0
        self._stream: PeerStream[target_pb2.VerifyRequest, target_pb2.VerifyResponse] = PeerStream(
            endpoint, self, client_id=client_id, role="verifier", timing=timing, tls=tls
        )

    @property
    def is_up(self) -> bool:
        """Whether the stream is open."""
        return self._stream.is_up

    @property
    def last_reason(self) -> str:
        """Why the stream is down, or was before."""
        return self._stream.last_reason

    async def run(self, events: VerifierEvents) -> None:
        """Keeps the link up until cancelled, and hands what happens to `events`."""
        self._events = events
        await self._stream.run()

    # Messages to the verifier; all return at once.

    def open(self, opening: target_pb2.OpenSequence) -> None:
        """Starts a sequence."""
        self._pending.opens.append(opening)
        self._flush()

    def close(self, sequence_id: int) -> None:
        """Ends a sequence; a no-op on a stream that is down, since its end ended everything."""
        if self.is_up:
            self._pending.closes.append(sequence_id)
            self._flush()

    def attach(self, sequence_id: int, subscriber_id: str) -> None:
        """Lets the verifier push the sequence's features, from position 0, to a subscriber."""
        self._pending.attaches.add(sequence_id=sequence_id, subscriber_id=subscriber_id, start=0)
        self._flush()

    def draft(self, drafts: peer_pb2.DraftBatch) -> None:
        """Forwards draft entries, with the verifier's epochs."""
        pending = self._pending.drafts
        is_full = (
            len(pending.tokens) > MAX_PENDING_DRAFT_TOKENS
            or len(pending.support_tokens) > MAX_PENDING_SUPPORT_TOKENS
        )
        if not self.is_up or is_full:
            self.num_dropped_draft_tokens += len(drafts.tokens)
            return
        if self._pending.HasField("drafts"):
            join_drafts(self._pending.drafts, drafts)
        else:
            self._pending.drafts.CopyFrom(drafts)
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
        """Asks the verifier who it is."""
        stub = target_pb2_grpc.TargetServiceStub(channel)
        response = await stub.Describe(target_pb2.TargetServiceDescribeRequest(), timeout=timeout_s)
        info: peer_pb2.PeerInfo = response.info
        return info

    def check(self, info: peer_pb2.PeerInfo) -> None:
        """Refuses a verifier with another model while sequences of the old one wait to be resumed."""
        check_protocol(info)
        if (
            self.info is not None
            and self._num_running()
            and self.info.model_fingerprint != info.model_fingerprint
        ):
            raise IncompatiblePeerError(
                "the verifier came back with another model; running requests cannot continue there"
            )

    def call(self, channel: grpc.aio.Channel) -> Any:
        """Starts the Verify call."""
        return target_pb2_grpc.TargetServiceStub(channel).Verify()

    def hello(self, hello: peer_pb2.StreamHello) -> target_pb2.VerifyRequest:
        """First frame; it drops what was pending for an earlier stream."""
        self._pending = target_pb2.VerifyRequest()
        self._is_pending = False
        return target_pb2.VerifyRequest(hello=hello)

    def hello_of(self, frame: target_pb2.VerifyResponse) -> peer_pb2.PeerInfo | None:
        """The verifier's hello; what it timed at its start is kept for `went_up`."""
        if frame.HasField("profile"):
            self.profile = frame.profile
        return frame.hello if frame.HasField("hello") else None

    def take(self, is_heartbeat_due: bool) -> target_pb2.VerifyRequest | None:
        """The pending frame."""
        if self._is_pending:
            frame, self._pending = self._pending, target_pb2.VerifyRequest()
            self._is_pending = False
            return frame
        return target_pb2.VerifyRequest() if is_heartbeat_due else None

    def silent_for(self, now: float) -> float:
        """A verifier with sequences reports every step, so its silence is the time since its last frame."""
        return now - self._last_frame_at if self._num_running() else 0.0

    def note_work(self) -> None:
        """An idle verifier gets work: its silence counts from now."""
        self._last_frame_at = self._clock()

    def went_up(self, info: peer_pb2.PeerInfo) -> None:
        """Passes the event on."""
        self.info = info
        self.is_known.set()
        self._last_frame_at = self._clock()
        self._events.verifier_up(info)

    def went_down(self, reason: str) -> None:
        """Passes the event on."""
        self._pending = target_pb2.VerifyRequest()
        self._is_pending = False
        self._events.verifier_down(reason)

    def received(self, frame: target_pb2.VerifyResponse) -> None:
        """Passes the event on."""
        self._last_frame_at = self._clock()
        self._events.verifier_frame(frame)
