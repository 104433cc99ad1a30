"""Rounds from a commit at a verifier to the drafts that go on from it, timed at the verifier's clock.

Responsible for: a verifier that commits on demand, and the two ways for its commits to a drafter: a conductor's stream,
and one of its own. Deliberately does not know: what the figures mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from experiments.hop.drafter import identity
from paceline import PROTOCOL_VERSION
from paceline.v1 import (
    drafter_pb2,
    drafter_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    peer_pb2,
    sampling_pb2,
    target_pb2,
    target_pb2_grpc,
)
from services.runtime.channel import open_channel, server_options

PROMPT = (1, 2, 3)
DEADLINE_S = 30.0
GREEDY = sampling_pb2.SamplingParams(temperature=0.0, seed=1, mode=sampling_pb2.VERIFY_MODE_GREEDY)


class CommittingVerifier(target_pb2_grpc.TargetServiceServicer):
    """Opens what it is asked to, and commits when it is told to."""

    def __init__(self) -> None:
        self.port = 0
        self.lengths: dict[int, int] = {}
        self._out: asyncio.Queue[target_pb2.VerifyResponse] = asyncio.Queue()
        self._missing: set[int] = set()
        self._has_all = asyncio.Event()
        self._server = grpc.aio.server(options=server_options())

    async def start(self) -> None:
        """Listen on a free port."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        """Let go of the port."""
        await self._server.stop(None)

    async def Describe(self, request: Any, context: Any) -> target_pb2.TargetServiceDescribeResponse:
        return target_pb2.TargetServiceDescribeResponse(info=identity("verifier"))

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        await anext(request_iterator)
        yield target_pb2.VerifyResponse(hello=identity("verifier"))
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield await self._out.get()
        finally:
            reading.cancel()

    async def _read(self, frames: AsyncIterator[target_pb2.VerifyRequest]) -> None:
        async for frame in frames:
            for opening in frame.opens:
                sequence_id = len(self.lengths) + 1
                self.lengths[sequence_id] = len(opening.prompt_token_ids)
                opened = target_pb2.SequenceOpened(
                    key=opening.key, sequence_id=sequence_id, epoch=opening.epoch
                )
                self._out.put_nowait(target_pb2.VerifyResponse(opened=[opened]))
            self.take(frame.drafts)

    def take(self, drafts: peer_pb2.DraftBatch) -> None:
        """Note which sequences have drafts that go on from their newest commit."""
        for sequence_id, start in zip(drafts.sequence_ids, drafts.starts, strict=True):
            if start == self.lengths.get(sequence_id):
                self._missing.discard(sequence_id)
        if not self._missing:
            self._has_all.set()

    def commit(self) -> peer_pb2.CommitBatch:
        """Another token for every sequence; their drafts are missing from now on."""
        batch = peer_pb2.CommitBatch()
        for sequence_id, length in self.lengths.items():
            batch.sequence_ids.append(sequence_id)
            batch.epochs.append(0)
            batch.starts.append(length)
            batch.sizes.append(1)
            batch.tokens.append(7)
            self.lengths[sequence_id] = length + 1
        self._missing = set(self.lengths)
        self._has_all.clear()
        return batch

    async def drafted(self) -> None:
        """Wait for the drafts of all sequences."""
        async with asyncio.timeout(DEADLINE_S):
            await self._has_all.wait()

    def report(self, commits: peer_pb2.CommitBatch) -> None:
        """Send a step to the conductor."""
        count = len(commits.sequence_ids)
        report = target_pb2.StepReport(
            step_index=1, num_rows=count, num_sequences=count, step_us=1000, commits=commits
        )
        for array in (report.num_draft_tokens, report.draft_depths, report.num_accepted_tokens):
            array.extend([0] * count)
        report.finish_reasons.extend([sampling_pb2.FINISH_REASON_UNSPECIFIED] * count)
        self._out.put_nowait(target_pb2.VerifyResponse(step=report))


async def through_conductor(
    verifier: CommittingVerifier, conductor: str, num_sequences: int, num_rounds: int
) -> list[float]:
    """Seconds of each round by way of a conductor, whose requests are read as a gateway reads them."""
    async with open_channel(conductor) as channel:
        stub = orchestrator_pb2_grpc.ConductorServiceStub(channel)
        runs = [
            asyncio.create_task(_read_all(stub, f"request-{which}", num_rounds))
            for which in range(num_sequences)
        ]
        try:
            while len(verifier.lengths) < num_sequences:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # the openings at the drafter have been answered
            return [await _round(verifier, verifier.report) for _ in range(num_rounds)]
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)


async def directly(
    verifier: CommittingVerifier, drafter: str, num_sequences: int, num_rounds: int
) -> list[float]:
    """Seconds of each round over a stream from the verifier's process to the drafter's."""
    verifier.lengths = {which + 1: len(PROMPT) for which in range(num_sequences)}
    async with open_channel(drafter) as channel:
        call = drafter_pb2_grpc.DrafterServiceStub(channel).Draft()
        hello = peer_pb2.StreamHello(protocol_version=PROTOCOL_VERSION, client_id="direct", lease_ms=60_000)
        opens = [
            drafter_pb2.OpenDraftSequence(
                sequence_id=which, token_ids=PROMPT, sampling=GREEDY, max_draft_tokens=64
            )
            for which in verifier.lengths
        ]
        policy = peer_pb2.StepPolicy(draft_length=4)
        await call.write(drafter_pb2.DraftRequest(hello=hello, frame_id=1, opens=opens, policy=policy))
        reading = asyncio.create_task(_take_all(verifier, call))
        try:
            await asyncio.sleep(0.2)

            def send(commits: peer_pb2.CommitBatch) -> None:
                sending.append(
                    asyncio.create_task(call.write(drafter_pb2.DraftRequest(frame_id=2, commits=commits)))
                )

            sending: list[asyncio.Task[None]] = []
            return [await _round(verifier, send) for _ in range(num_rounds)]
        finally:
            reading.cancel()
            call.cancel()
            await asyncio.gather(reading, *sending, return_exceptions=True)


async def _round(verifier: CommittingVerifier, send: Any) -> float:
    commits = verifier.commit()
    began = time.perf_counter()
    send(commits)
    await verifier.drafted()
    elapsed = time.perf_counter() - began
    await asyncio.sleep(0.005)  # what else the round has set off comes to rest
    return elapsed


async def _take_all(verifier: CommittingVerifier, call: Any) -> None:
    async for answer in call:
        verifier.take(answer.drafts)


async def _read_all(
    stub: orchestrator_pb2_grpc.ConductorServiceStub, request_id: str, num_tokens: int
) -> Sequence[int]:
    request = orchestrator_pb2.RunRequest(
        request_id=request_id, prompt_token_ids=PROMPT, sampling=GREEDY, max_new_tokens=num_tokens + 8
    )
    tokens: list[int] = []
    async for frame in stub.Run(request):
        tokens.extend(frame.token_ids)
    return tokens
