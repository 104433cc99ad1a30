"""A conductor's end of a Verify stream, and the shape of the tiny target behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline import PROTOCOL_VERSION
from paceline.v1 import peer_pb2, sampling_pb2, target_pb2, target_pb2_grpc
from services.runtime.channel import open_channel

VOCAB_SIZE = 61
MAX_POSITIONS = 200
DEADLINE_S = 20.0


class Conductor:
    """A conductor's end of a Verify stream that keeps what it is told, by sequence."""

    def __init__(self, port: int, lease_ms: int = 60_000) -> None:
        self._channel = open_channel(f"127.0.0.1:{port}")
        self.stub = target_pb2_grpc.TargetServiceStub(self._channel)
        self._lease_ms = lease_ms
        self.opened: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, int] = {}
        self.failures: list[peer_pb2.SequenceFailure] = []
        self.steps: list[target_pb2.StepReport] = []
        self.num_accepted = 0
        self.log_probs: dict[int, list[target_pb2.SequenceLogProbs]] = {}
        self._next_key = 0

    async def __aenter__(self) -> Conductor:
        self.call = self.stub.Verify()
        hello = peer_pb2.StreamHello(
            protocol_version=PROTOCOL_VERSION, client_id="test", lease_ms=self._lease_ms
        )
        await self.call.write(target_pb2.VerifyRequest(hello=hello))
        self.info = (await asyncio.wait_for(self.call.read(), DEADLINE_S)).hello
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def open(self, prompt: Sequence[int], max_new_tokens: int = 24, **fields: Any) -> int:
        """Open a sequence; returns its id, or 0 if it was refused."""
        self._next_key += 1
        key = fields.pop("key", self._next_key)
        fields.setdefault("sampling", sampling_pb2.SamplingParams(temperature=0.0))
        fields.setdefault("max_draft_nodes", 8)
        opening = target_pb2.OpenSequence(
            key=key, prompt_token_ids=prompt, max_new_tokens=max_new_tokens, **fields
        )
        num_failures = len(self.failures)
        await self.send(opens=[opening])
        await self.read_until(lambda: key in self.opened or len(self.failures) > num_failures)
        return self.opened.get(key, 0)

    async def send(self, **fields: Any) -> None:
        """Write one frame."""
        await self.call.write(target_pb2.VerifyRequest(**fields))

    async def read_frame(self) -> None:
        """Take in one frame."""
        frame = await asyncio.wait_for(self.call.read(), DEADLINE_S)
        assert isinstance(frame, target_pb2.VerifyResponse), "the stream ended"
        for opened in frame.opened:
            self.opened[opened.key] = opened.sequence_id
            self.tokens[opened.sequence_id] = []
        self.failures.extend(frame.failures)
        for failure in frame.failures:
            self.finished[failure.sequence_id] = -1
        if not frame.HasField("step"):
            return
        self.steps.append(frame.step)
        for message in frame.step.log_probs:
            self.log_probs.setdefault(message.sequence_id, []).append(message)
        commits, begin = frame.step.commits, 0
        for which, sequence_id in enumerate(commits.sequence_ids):
            size = commits.sizes[which]
            self.tokens[sequence_id].extend(commits.tokens[begin : begin + size])
            begin += size
            self.num_accepted += frame.step.num_accepted_tokens[which]
            if frame.step.finish_reasons[which]:
                self.finished[sequence_id] = frame.step.finish_reasons[which]

    async def read_until(self, condition: Any) -> None:
        """Take in frames until a condition holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await self.read_frame()

    async def finish(self, *sequence_ids: int) -> list[list[int]]:
        """Wait for sequences to end; returns their tokens."""
        await self.read_until(lambda: all(s in self.finished for s in sequence_ids))
        return [self.tokens[s] for s in sequence_ids]
