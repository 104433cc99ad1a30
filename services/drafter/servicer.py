"""DrafterService at the wire: checks frames, hands them to the draft loop, and writes its answers.

Knows gRPC, and does not know how drafts are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog

from paceline.contract.errors import InvalidRequestError, StreamProtocolError
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, peer_pb2
from services.drafter.feature_routes import FeatureRoutes
from services.drafter.inbox import DrafterInbox, Opening, SessionEnded
from services.drafter.requests import FrameReader
from services.drafter.session import DraftSession
from services.runtime.channel import split_endpoint
from services.runtime.lease import check_hello, next_frame

log = structlog.get_logger()


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves conductors."""

    def __init__(
        self, info: peer_pb2.PeerInfo, inbox: DrafterInbox, reader: FrameReader, routes: FeatureRoutes
    ) -> None:
        self._info = info
        self._inbox = inbox
        self._reader = reader
        self._routes = routes
        self._sessions: set[DraftSession] = set()

    def end_streams(self) -> None:
        """Ends every stream at shutdown. Conductors continue without this drafter."""
        for session in self._sessions:
            session.end()

    async def Describe(
        self, request: drafter_pb2.DrafterServiceDescribeRequest, context: Any
    ) -> drafter_pb2.DrafterServiceDescribeResponse:
        """Identity, limits and device."""
        return drafter_pb2.DrafterServiceDescribeResponse(info=self._info)

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """One conductor's stream. Its sequences end with it."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("hello"):
            raise StreamProtocolError("the first frame must carry hello")
        lease_s = check_hello(first.hello)
        session = DraftSession(asyncio.get_running_loop(), first.hello.client_id)
        self._sessions.add(session)
        log.info("stream opened", session=session.number, client_id=session.client_id, lease_s=lease_s)
        session.push(drafter_pb2.DraftResponse(hello=self._info))
        reading = asyncio.create_task(self._read(session, first, request_iterator, lease_s))
        try:
            while not session.is_overrun and (answer := await session.pop()) is not None:
                yield answer
            if reading.done():
                reading.result()  # raises what ended the reading, if anything did
        finally:
            reading.cancel()
            self._sessions.discard(session)
            self._inbox.put(SessionEnded(session))
            log.info("stream closed", session=session.number, client_id=session.client_id)

    async def _read(
        self,
        session: DraftSession,
        first: drafter_pb2.DraftRequest,
        frames: AsyncIterator[drafter_pb2.DraftRequest],
        lease_s: float,
    ) -> None:
        frame: drafter_pb2.DraftRequest | None = first
        iterator = aiter(frames)
        try:
            while frame is not None:
                item = self._reader.read(session, frame, self._admit)
                self._inbox.put(item)
                for (
                    opening
                ) in item.openings:  # what their features are must not reach the loop before they do
                    self._routes.replay(opening.local_id)
                frame = await next_frame(iterator, lease_s)
        finally:
            session.end()

    def _admit(self, message: drafter_pb2.OpenDraftSequence, opening: Opening) -> None:
        """Routes the features of an opened sequence."""
        if not opening.reads_features:
            return
        split_endpoint(message.verifier_endpoint)  # raises InvalidRequestError
        if not message.verifier_instance_id:
            raise InvalidRequestError("verifier_instance_id", "must not be empty")
        self._routes.route(
            message.verifier_endpoint, message.verifier_instance_id, message.sequence_id, opening.local_id
        )
