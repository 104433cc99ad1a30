"""TargetService at the wire: checks frames, hands them to the step loop, and writes its reports.

Knows gRPC, and does not know how a step is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog

from paceline.contract.errors import (
    DrainingError,
    IncompatiblePeerError,
    InvalidRequestError,
    PacelineError,
    StreamProtocolError,
)
from paceline.contract.failures import StatusCode
from paceline.contract.policy import StepPolicy
from paceline.v1 import peer_pb2, target_pb2, target_pb2_grpc
from services.runtime.feature_taps import describe_tap
from services.runtime.frames import unpack_drafts
from services.runtime.lease import check_hello, next_frame
from services.verifier.feature_hub import FeatureHub, Subscriber
from services.verifier.grammar_compiler import RequestGrammars
from services.verifier.inbox import AddDrafts, Attach, Close, CloseSession, Open, SetPolicy, VerifierInbox
from services.verifier.profile import TimedStep, profile_message
from services.verifier.session import VerifySession
from services.verifier.specs import SequenceSpec, sequence_spec

log = structlog.get_logger()


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves conductors and drafters."""

    def __init__(
        self,
        info: peer_pb2.PeerInfo,
        inbox: VerifierInbox,
        features: FeatureHub,
        constraints: RequestGrammars,
        draining: asyncio.Event,
        profile: list[TimedStep],
    ) -> None:
        self._info = info
        self._inbox = inbox
        self._features = features
        self._constraints = constraints
        self._draining = draining
        self._profile = profile  # emptied when the first stream has sent it
        self._sessions: set[VerifySession] = set()
        self._subscribers: set[Subscriber] = set()

    def end_streams(self) -> None:
        """End every open stream in good order. Called when no sequence runs any more."""
        for session in self._sessions:
            session.end()
        for subscriber in self._subscribers:
            subscriber.end()

    async def Describe(
        self, request: target_pb2.TargetServiceDescribeRequest, context: Any
    ) -> target_pb2.TargetServiceDescribeResponse:
        """Identity, limits and device."""
        return target_pb2.TargetServiceDescribeResponse(info=self._info)

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """One conductor's stream. Its sequences end with it."""
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise StreamProtocolError("the first frame must carry hello")
        lease_s = check_hello(first.hello)
        session = VerifySession(asyncio.get_running_loop(), first.hello.client_id)
        log.info("stream opened", session=session.number, client_id=session.client_id, lease_s=lease_s)
        greeting = target_pb2.VerifyResponse(hello=self._info)
        if self._profile:
            greeting.profile.CopyFrom(profile_message(self._profile))
            self._profile = []
        session.push(greeting)
        self._take(session, first)
        reader = asyncio.create_task(self._read(session, request_iterator, lease_s))
        self._sessions.add(session)
        try:
            while (frame := await session.pop()) is not None:
                yield frame
            if reader.done():
                await reader  # raises what ended the reading, if anything did
        finally:
            self._sessions.discard(session)
            reader.cancel()
            for (
                opening
            ) in session.openings:  # an opening must not reach the loop after the end of its session
                opening.cancel()
            self._inbox.put(CloseSession(session))
            log.info("stream closed", session=session.number, client_id=session.client_id)

    async def _read(
        self, session: VerifySession, frames: AsyncIterator[target_pb2.VerifyRequest], lease_s: float
    ) -> None:
        try:
            while True:
                frame = await next_frame(frames, lease_s)
                if frame is None or session.is_overrun:
                    return
                self._take(session, frame)
        finally:
            session.end()

    def _take(self, session: VerifySession, frame: target_pb2.VerifyRequest) -> None:
        """Check one frame and hand its parts to the loop."""
        for opening in frame.opens:
            self._open(session, opening)
        for sequence_id in frame.closes:
            self._inbox.put(Close(session, sequence_id))
        for attach in frame.attaches:
            self._inbox.put(Attach(session, attach.sequence_id, attach.subscriber_id, attach.start))
        if frame.HasField("policy"):
            self._inbox.put(SetPolicy(StepPolicy.from_proto(frame.policy)))
        if frame.HasField("drafts"):
            entries, num_malformed = unpack_drafts(frame.drafts, self._info.vocab_size)
            self._inbox.put(AddDrafts(session, tuple(entries), num_malformed))

    def _open(self, session: VerifySession, opening: target_pb2.OpenSequence) -> None:
        if self._draining.is_set():
            self._refuse(session, opening.key, StatusCode.UNAVAILABLE, DrainingError("shutting down"))
            return
        try:
            spec = sequence_spec(opening, self._info)
        except InvalidRequestError as error:
            self._refuse(session, opening.key, StatusCode.INVALID_ARGUMENT, error)
            return
        if spec.sampling.constraint is None:
            self._inbox.put(Open(session, spec))
            return
        # No frame can name a sequence before it is open, so the frames that follow need not wait for its grammar.
        task = asyncio.create_task(self._open_constrained(session, spec))
        session.openings.add(task)
        task.add_done_callback(session.openings.discard)

    async def _open_constrained(self, session: VerifySession, spec: SequenceSpec) -> None:
        try:
            rule = await self._constraints.rule(spec)
        except InvalidRequestError as error:
            self._refuse(session, spec.key, StatusCode.INVALID_ARGUMENT, error)
        except PacelineError as error:
            self._refuse(session, spec.key, StatusCode.UNAVAILABLE, error)
        except Exception as error:  # an opening without an answer would hang
            log.exception("a constraint could not be compiled", session=session.number, key=spec.key)
            self._refuse(
                session, spec.key, StatusCode.INTERNAL, PacelineError(f"{type(error).__name__}: {error}")
            )
        else:
            self._inbox.put(Open(session, spec, rule))

    @staticmethod
    def _refuse(session: VerifySession, key: int, code: int, error: PacelineError) -> None:
        failure = peer_pb2.SequenceFailure(key=key, code=code, reason=error.reason, message=str(error))
        session.push(target_pb2.VerifyResponse(failures=[failure]))

    async def StreamFeatures(
        self, request: target_pb2.StreamFeaturesRequest, context: Any
    ) -> AsyncIterator[target_pb2.StreamFeaturesResponse]:
        """Pushes the features of every sequence that is attached to this subscriber."""
        if not request.subscriber_id:
            raise InvalidRequestError("subscriber_id", "must not be empty")
        if request.tap != self._info.tap:
            raise IncompatiblePeerError(
                f"the drafter reads {describe_tap(request.tap)}, this verifier taps {describe_tap(self._info.tap)}: "
                "start it with the drafter's own checkpoint as --tap-from"
            )
        subscriber = Subscriber(asyncio.get_running_loop(), request.subscriber_id)
        self._features.subscribe(subscriber)
        log.info("features subscribed", subscriber_id=request.subscriber_id)
        self._subscribers.add(subscriber)
        try:
            while not subscriber.is_overrun and (chunk := await subscriber.pop()) is not None:
                yield chunk
        finally:
            self._subscribers.discard(subscriber)
            self._features.unsubscribe(subscriber)
