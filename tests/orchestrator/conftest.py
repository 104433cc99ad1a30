"""A conductor in process, with scripted peers on real sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest_asyncio

from orchestrator.conductor import Conductor
from orchestrator.settings import OrchestratorSettings
from orchestrator.status import ConductorStatus
from paceline.v1 import generation_pb2, orchestrator_pb2, orchestrator_pb2_grpc, sampling_pb2
from services.runtime.channel import open_channel
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_peers import Server
from tests.orchestrator.scripted_verifier import ScriptedVerifier

_request_ids = itertools.count(1)


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def run_request(prompt: list[int], max_new_tokens: int, **fields: Any) -> orchestrator_pb2.RunRequest:
    """A request as a gateway sends it."""
    return orchestrator_pb2.RunRequest(
        **(
            {
                "request_id": f"request-{next(_request_ids)}",
                "prompt_token_ids": prompt,
                "sampling": sampling_pb2.SamplingParams(
                    temperature=0.0, seed=1, mode=sampling_pb2.VERIFY_MODE_GREEDY
                ),
                "max_new_tokens": max_new_tokens,
            }
            | fields
        )
    )


@dataclass
class Outcome:
    """What a Run stream said."""

    tokens: list[int] = field(default_factory=list)
    reason: int = 0
    stats: generation_pb2.GenerationStats = field(default_factory=generation_pb2.GenerationStats)
    num_ends: int = 0
    log_probs: sampling_pb2.LogProbs = field(default_factory=sampling_pb2.LogProbs)
    prompt_log_probs: sampling_pb2.LogProbs = field(default_factory=sampling_pb2.LogProbs)


class Bench:
    """A conductor and its peers."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.conductor: Conductor
        self.status: ConductorStatus
        self.stub: orchestrator_pb2_grpc.ConductorServiceStub

    async def start(
        self,
        verifier: ScriptedVerifier,
        *drafters: ScriptedDrafter,
        wait_for_peers: bool = True,
        **settings: Any,
    ) -> None:
        peers: tuple[Server, ...] = (verifier, *drafters)
        for peer in peers:
            if not peer.port:
                await peer.start()
                self._stack.push_async_callback(peer.stop)
        values: dict[str, Any] = {
            "verifiers": (verifier.endpoint,),
            "drafters": tuple(drafter.endpoint for drafter in drafters),
            "max_resumes": 3,
            "resume_timeout_s": 5.0,
            "drain_s": 2.0,
        }
        self.conductor = Conductor(
            OrchestratorSettings(**(values | settings)), verifier.endpoint, "127.0.0.1"
        )
        self.status = await self.conductor.start()
        self._stack.push_async_callback(self.conductor.shutdown, 0.0)
        channel = open_channel(self.status.endpoint)
        self._stack.push_async_callback(channel.close)
        self.stub = orchestrator_pb2_grpc.ConductorServiceStub(channel)
        if wait_for_peers:
            await self.until(lambda status: status.is_ready and len(status.drafters) == len(drafters))

    async def until(self, condition: Callable[[ConductorStatus], object], timeout_s: float = 10.0) -> None:
        """Waits until the conductor's status meets a condition."""
        async with asyncio.timeout(timeout_s):
            while True:
                self.status = await self.conductor.start()
                if condition(self.status):
                    return
                await asyncio.sleep(0.01)

    async def run(
        self,
        request: orchestrator_pb2.RunRequest,
        timeout_s: float = 20.0,
        outcome: Outcome | None = None,
    ) -> Outcome:
        """Runs one request to its end; an outcome that is given fills up meanwhile."""
        outcome = outcome or Outcome()
        async for frame in self.stub.Run(request, timeout=timeout_s):
            outcome.tokens.extend(frame.token_ids)
            outcome.log_probs.MergeFrom(frame.log_probs)
            outcome.prompt_log_probs.MergeFrom(frame.prompt_log_probs)
            assert not frame.token_ids or len(outcome.log_probs.log_probs) in (0, len(outcome.tokens))
            if frame.finish_reason:
                outcome.num_ends += 1
                outcome.reason = frame.finish_reason
                outcome.stats = frame.stats
        return outcome


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    """An empty bench; `start` puts peers on it."""
    async with AsyncExitStack() as stack:
        yield Bench(stack)
