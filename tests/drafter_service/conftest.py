"""The drafter process's parts, in process, on real sockets, with a client that speaks as a conductor does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest_asyncio

from paceline import PROTOCOL_VERSION
from paceline.methods.drafter import Drafter
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, peer_pb2
from services.drafter.host import DrafterHost
from services.drafter.settings import DrafterSettings
from services.runtime.channel import open_channel
from tests.drafter_service.scripted import VOCAB_SIZE, WIDTH
from tests.hosting import hosted


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def drafter_info(drafter: Drafter, **changes: Any) -> peer_pb2.PeerInfo:
    """The identity of a hosted drafter."""
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "instance_id": "drafter-under-test",
        "model_fingerprint": "f" * 64,
        "vocab_size": VOCAB_SIZE,
        "max_positions": drafter.max_positions,
        "method": drafter.method,
    }
    if drafter.tap is not None:
        fields["tap"] = peer_pb2.FeatureTap(
            layers=drafter.tap.layers,
            width=WIDTH,
            final_norm=drafter.tap.norm_final,
            last_only=drafter.tap.last_only,
            is_optional=drafter.tap.is_optional,
        )
    return peer_pb2.PeerInfo(**(fields | changes))


class Conductor:
    """One Draft stream."""

    def __init__(self, stub: drafter_pb2_grpc.DrafterServiceStub) -> None:
        self._call = stub.Draft()
        self._frame_id = 0
        self.hello: drafter_pb2.DraftResponse

    async def begin(self, **hello: Any) -> Conductor:
        """Says hello and waits for the answer."""
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "client_id": "test",
            "lease_ms": 10_000,
        }
        await self._call.write(drafter_pb2.DraftRequest(hello=peer_pb2.StreamHello(**(fields | hello))))
        self.hello = await self.read()
        return self

    async def send(self, **fields: Any) -> int:
        """Sends a frame; returns its id."""
        self._frame_id += 1
        await self._call.write(drafter_pb2.DraftRequest(frame_id=self._frame_id, **fields))
        return self._frame_id

    async def read(self, timeout_s: float = 10.0) -> drafter_pb2.DraftResponse:
        """Next answer."""
        async with asyncio.timeout(timeout_s):
            answer = await self._call.read()
        if answer is grpc.aio.EOF:
            code = await self._call.code()
            raise grpc.aio.AioRpcError(
                code,
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                details=await self._call.details(),
            )
        response: drafter_pb2.DraftResponse = answer
        return response

    async def read_drafts(self) -> drafter_pb2.DraftResponse:
        """Next answer that carries drafts."""
        while not (answer := await self.read()).drafts.sequence_ids:
            continue
        return answer

    def close(self) -> None:
        self._call.cancel()


def opening(
    sequence_id: int, tokens: list[int], epoch: int = 1, **fields: Any
) -> drafter_pb2.OpenDraftSequence:
    """A sequence to open."""
    return drafter_pb2.OpenDraftSequence(
        **({"sequence_id": sequence_id, "epoch": epoch, "token_ids": tokens, "max_draft_tokens": 64} | fields)
    )


def commits(*items: tuple[int, int, list[int]], epoch: int = 1) -> peer_pb2.CommitBatch:
    """Commits of (sequence, committed length before, tokens)."""
    batch = peer_pb2.CommitBatch()
    for sequence_id, start, tokens in items:
        batch.sequence_ids.append(sequence_id)
        batch.epochs.append(epoch)
        batch.starts.append(start)
        batch.sizes.append(len(tokens))
        batch.tokens.extend(tokens)
    return batch


class Bench:
    """Serves drafters and opens streams to them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.stub: drafter_pb2_grpc.DrafterServiceStub

    async def serve(
        self, drafter: Drafter, info: peer_pb2.PeerInfo | None = None, **settings: Any
    ) -> Conductor:
        """Serves a drafter and returns a stream to it that has said hello."""
        values: dict[str, Any] = {
            "drafter": Path("unused"),
            "model": "unused",
            "port": 0,
            "metrics_port": None,
        }
        host = DrafterHost(DrafterSettings(**(values | settings)), drafter, info or drafter_info(drafter))
        process = await self.stack.enter_async_context(hosted("drafter", host.settings, host.attach))
        channel = open_channel(f"127.0.0.1:{process.port}")
        self.stack.push_async_callback(channel.close)
        self.stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        return await self.connect()

    async def connect(self, **hello: Any) -> Conductor:
        """Another stream to the same drafter."""
        conductor = Conductor(self.stub)
        self.stack.callback(conductor.close)
        return await conductor.begin(**hello)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    """An empty bench."""
    async with AsyncExitStack() as stack:
        yield Bench(stack)
