"""Target features on their way in: one StreamFeatures subscription per verifier, opened on demand.

Responsible for: subscribing, connecting again, checking chunks, and routing them to the sequences that wait for them.
A verifier replays a sequence's features from position 0 whenever it is attached or the subscription is opened anew,
so nothing is asked for again here: repeats are cut and gaps noticed by the draft loop. Deliberately does not know
what features mean. Routes are set by the servicer and dropped by the loop's thread; all else runs on the event loop.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import grpc
import structlog

from paceline.contract.errors import IncompatiblePeerError, InvalidRequestError, PacelineError
from paceline.contract.failures import FailureReason
from paceline.contract.limits import MAX_MESSAGE_BYTES
from paceline.v1 import peer_pb2, target_pb2, target_pb2_grpc
from services.drafter.inbox import DrafterInbox, Features, FeaturesLost
from services.runtime import feature_parts, tensors
from services.runtime.channel import open_channel
from services.runtime.error_mapping import from_rpc_error
from services.runtime.tls import Tls

CONNECT_TIMEOUT_S = 3.0
BACKOFF_S = (0.1, 2.0)
MAX_EARLY_CHUNKS = 1024
MAX_EARLY_BYTES = 64 << 20

log = structlog.get_logger()


@dataclass(slots=True)
class Route:
    """Where a sequence's chunks go.

    Attributes:
        local_id: the sequence.
        instance_id: the verifier instance that runs it; another one's sequence of the same id is another text.
        epoch: the verifier's epoch, from the first chunk.
    """

    local_id: int
    instance_id: str
    epoch: int | None = None


@dataclass(slots=True)
class EarlyChunks:
    """Chunks that came before their sequence was opened here: the verifier may be quicker than the conductor."""

    chunks: OrderedDict[int, list[target_pb2.StreamFeaturesResponse]] = field(default_factory=OrderedDict)
    num_chunks: int = 0
    num_bytes: int = 0

    def add(self, chunk: target_pb2.StreamFeaturesResponse) -> None:
        """Keeps a chunk; the oldest sequences' are dropped for it."""
        self.chunks.setdefault(chunk.sequence_id, []).append(chunk)
        self.num_chunks += 1
        self.num_bytes += _num_bytes(chunk)
        while self.chunks and (self.num_chunks > MAX_EARLY_CHUNKS or self.num_bytes > MAX_EARLY_BYTES):
            self.take(next(iter(self.chunks)))

    def take(self, sequence_id: int) -> list[target_pb2.StreamFeaturesResponse]:
        """Gives up the chunks of a sequence."""
        taken = self.chunks.pop(sequence_id, [])
        self.num_chunks -= len(taken)
        self.num_bytes -= sum(_num_bytes(chunk) for chunk in taken)
        return taken


def _num_bytes(chunk: target_pb2.StreamFeaturesResponse) -> int:
    return len(chunk.features.data) + sum(len(part.data) for part in chunk.recent)


class Subscription:
    """One verifier's features."""

    def __init__(self, endpoint: str, info: peer_pb2.PeerInfo, inbox: DrafterInbox, tls: Tls | None) -> None:
        self.endpoint = endpoint
        self.routes: dict[int, Route] = {}  # by the verifier's sequence id
        self._info = info
        self._parts = feature_parts.tap_parts(info.tap)
        self._inbox = inbox
        self._tls = tls
        self._early = EarlyChunks()
        self._instance_id = ""
        self._log = log.bind(verifier=endpoint)

    def replay(self, sequence_id: int, route: Route) -> None:
        """Hands over what came in before the sequence was routed."""
        for chunk in self._early.take(sequence_id):
            self._forward(route, chunk)

    async def run(self) -> None:
        """Keeps the subscription open until cancelled."""
        backoff_s, jitter, reason = BACKOFF_S[0], random.Random(self.endpoint), ""
        while True:
            try:
                await self._subscribe()
                error: PacelineError = PacelineError("the verifier ended the stream")
            except grpc.aio.AioRpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            except PacelineError as refusal:
                error = refusal
            if isinstance(error, IncompatiblePeerError):
                self._lose_all(FailureReason.INCOMPATIBLE_PEER, str(error))
            backoff_s = BACKOFF_S[0] if self._instance_id else min(2 * backoff_s, BACKOFF_S[1])
            if str(error) != reason:
                reason = str(error)
                self._log.warning("feature stream down", error=reason)
            self._instance_id = ""
            await asyncio.sleep(backoff_s * jitter.uniform(0.5, 1.0))

    async def _subscribe(self) -> None:
        channel = open_channel(self.endpoint, self._tls)
        try:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            described = await stub.Describe(
                target_pb2.TargetServiceDescribeRequest(), timeout=CONNECT_TIMEOUT_S
            )
            self._check(described.info)
            call = stub.StreamFeatures(
                target_pb2.StreamFeaturesRequest(subscriber_id=self._info.instance_id, tap=self._info.tap)
            )
            self._instance_id = described.info.instance_id
            self._early = EarlyChunks()
            for sequence_id, route in list(self.routes.items()):
                if route.instance_id != self._instance_id:
                    self.routes.pop(sequence_id, None)
                    self._inbox.put(
                        FeaturesLost(
                            route.local_id, FailureReason.FEATURES_LOST, "the verifier was restarted"
                        )
                    )
            self._log.info("features subscribed", instance_id=self._instance_id)
            async for chunk in call:
                reader = self.routes.get(chunk.sequence_id)
                if reader is None:
                    self._early.add(chunk)
                else:
                    self._forward(reader, chunk)
        finally:
            await channel.close(None)

    def _check(self, verifier: peer_pb2.PeerInfo) -> None:
        if verifier.model_fingerprint != self._info.model_fingerprint:
            raise IncompatiblePeerError("the verifier serves another target than this drafter was made for")
        if verifier.tap != self._info.tap:
            raise IncompatiblePeerError("the verifier serves other features than this drafter reads")

    def _forward(self, route: Route, chunk: target_pb2.StreamFeaturesResponse) -> None:
        """Checks a chunk and hands it to the loop."""
        if route.instance_id != self._instance_id:
            return
        if route.epoch is None or chunk.epoch > route.epoch:
            route.epoch = chunk.epoch
        elif chunk.epoch < route.epoch:
            return
        try:
            rows = feature_parts.join(
                tensors.decode(chunk.features, MAX_MESSAGE_BYTES, expect_rank=2),
                [
                    tensors.decode(part, MAX_MESSAGE_BYTES, expect_rank=2) if part.data else None
                    for part in chunk.recent
                ],
                self._parts,
            )  # [n, width]
        except InvalidRequestError as error:
            self._inbox.put(
                FeaturesLost(route.local_id, FailureReason.FEATURES_LOST, f"malformed features: {error}")
            )
            return
        if chunk.start + rows.shape[0] > self._info.max_positions:
            message = f"features of {rows.shape[0]} positions from {chunk.start}: too long a text"
            self._inbox.put(FeaturesLost(route.local_id, FailureReason.FEATURES_LOST, message))
            return
        tokens, last_only = tuple(chunk.tokens), self._info.tap.last_only
        if last_only and rows.shape[0] > 1:
            message = f"features of {rows.shape[0]} positions, one expected"
            self._inbox.put(FeaturesLost(route.local_id, FailureReason.FEATURES_LOST, message))
            return
        most = chunk.start + 1 if last_only else rows.shape[0]  # at least one token stood before them
        if len(tokens) > most or max(tokens, default=0) >= self._info.vocab_size:
            self._inbox.put(
                FeaturesLost(route.local_id, FailureReason.FEATURES_LOST, "malformed tokens beside features")
            )
            return
        self._inbox.put(Features(route.local_id, chunk.start, rows, tokens, time.monotonic()))

    def _lose_all(self, reason: str, message: str) -> None:
        for route in list(self.routes.values()):
            self._inbox.put(FeaturesLost(route.local_id, reason, message))


class FeatureRoutes:
    """All subscriptions, and who reads what."""

    def __init__(self, info: peer_pb2.PeerInfo, inbox: DrafterInbox, tls: Tls | None) -> None:
        self._info = info
        self._inbox = inbox
        self._tls = tls
        self._lock = threading.Lock()
        self._subscriptions: dict[str, Subscription] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._routed: dict[int, tuple[Subscription, int, Route]] = {}  # by local id

    def route(self, endpoint: str, instance_id: str, sequence_id: int, local_id: int) -> None:
        """Subscribes to a verifier, if need be, and routes one of its sequences; from the event loop's thread."""
        subscription = self._subscriptions.get(endpoint)
        if subscription is None:
            subscription = Subscription(endpoint, self._info, self._inbox, self._tls)
            self._subscriptions[endpoint] = subscription
            self._tasks[endpoint] = asyncio.create_task(subscription.run())
        route = Route(local_id, instance_id)
        with self._lock:
            self._routed[local_id] = (subscription, sequence_id, route)
            subscription.routes[sequence_id] = route

    def replay(self, local_id: int) -> None:
        """Hands over what came in before `route`, once the loop knows the sequence; from the event loop's thread."""
        with self._lock:
            routed = self._routed.get(local_id)
        if routed is not None:
            subscription, sequence_id, route = routed
            subscription.replay(sequence_id, route)

    def drop(self, local_id: int) -> None:
        """Forgets a sequence, unless its id has been routed anew; from any thread."""
        with self._lock:
            routed = self._routed.pop(local_id, None)
            if routed is not None:
                subscription, sequence_id, route = routed
                if subscription.routes.get(sequence_id) is route:
                    del subscription.routes[sequence_id]

    async def close(self) -> None:
        """Ends all subscriptions."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
