"""Target features on their way in: the StreamFeatures subscription to one verifier.

Responsible for: subscribing, connecting again, checking chunks, and forwarding them to the sequences that read them.
A verifier replays a sequence's features from position 0 whenever the sequence is attached or the subscription is opened
again. So nothing is requested twice here: the draft loop cuts repeats and notices gaps. Deliberately does not know what
features mean. Opened by services.drafter.feature_routes, runs on the event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import grpc
import structlog
from torch import Tensor

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
        instance_id: the verifier instance that runs it; another instance gives the same id to another text.
        epoch: the verifier's epoch, from the first chunk.
    """

    local_id: int
    instance_id: str
    epoch: int | None = None


@dataclass(slots=True)
class EarlyChunks:
    """Chunks that came before their sequence was opened here: the verifier may be faster than the conductor."""

    chunks: OrderedDict[int, list[target_pb2.StreamFeaturesResponse]] = field(default_factory=OrderedDict)
    num_chunks: int = 0
    num_bytes: int = 0

    def add(self, chunk: target_pb2.StreamFeaturesResponse) -> None:
        """Stores a chunk; where the bounds are exceeded, the chunks of the oldest sequences are dropped."""
        self.chunks.setdefault(chunk.sequence_id, []).append(chunk)
        self.num_chunks += 1
        self.num_bytes += _num_bytes(chunk)
        while self.chunks and (self.num_chunks > MAX_EARLY_CHUNKS or self.num_bytes > MAX_EARLY_BYTES):
            self.take(next(iter(self.chunks)))

    def take(self, sequence_id: int) -> list[target_pb2.StreamFeaturesResponse]:
        """Removes and returns the chunks of a sequence."""
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
        """Forwards the chunks that came in before the sequence was routed."""
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
                    self._lose(route, FailureReason.FEATURES_LOST, "the verifier was restarted")
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
            raise IncompatiblePeerError(
                "the verifier serves another target than the one this drafter was made for"
            )
        if verifier.tap != self._info.tap:
            raise IncompatiblePeerError("the verifier serves other features than this drafter reads")

    def _forward(self, route: Route, chunk: target_pb2.StreamFeaturesResponse) -> None:
        """Checks a chunk and puts it into the loop's inbox."""
        if route.instance_id != self._instance_id:
            return
        if route.epoch is None or chunk.epoch > route.epoch:
            route.epoch = chunk.epoch
        elif chunk.epoch < route.epoch:
            return
        try:
            rows = self._checked_rows(chunk)
        except InvalidRequestError as error:
            self._lose(route, FailureReason.FEATURES_LOST, f"malformed features: {error}")
        else:
            self._inbox.put(
                Features(route.local_id, chunk.start, rows, tuple(chunk.tokens), time.monotonic())
            )

    def _checked_rows(self, chunk: target_pb2.StreamFeaturesResponse) -> Tensor:
        """The features of a chunk, [n, width].

        Raises:
            InvalidRequestError: they are not what this drafter reads, or the tokens beside them cannot be.
        """
        rows = feature_parts.join(
            tensors.decode(chunk.features, MAX_MESSAGE_BYTES, expect_rank=2),
            [
                tensors.decode(part, MAX_MESSAGE_BYTES, expect_rank=2) if part.data else None
                for part in chunk.recent
            ],
            self._parts,
        )
        num_rows, last_only = rows.shape[0], self._info.tap.last_only
        if chunk.start + num_rows > self._info.max_positions:
            raise InvalidRequestError(
                "features",
                f"{num_rows} positions from {chunk.start}, this drafter has {self._info.max_positions}",
            )
        if last_only and num_rows > 1:
            raise InvalidRequestError("features", f"{num_rows} positions, this drafter reads one at a time")
        max_tokens = chunk.start + 1 if last_only else num_rows  # the text had at least one token before them
        if len(chunk.tokens) > max_tokens:
            raise InvalidRequestError("tokens", f"{len(chunk.tokens)} tokens beside {num_rows} positions")
        if max(chunk.tokens, default=0) >= self._info.vocab_size:
            raise InvalidRequestError("tokens", f"must be below the vocabulary size {self._info.vocab_size}")
        return rows

    def _lose(self, route: Route, reason: FailureReason, message: str) -> None:
        self._inbox.put(FeaturesLost(route.local_id, reason, message))

    def _lose_all(self, reason: FailureReason, message: str) -> None:
        for route in list(self.routes.values()):
            self._lose(route, reason, message)
