"""A verifier's real parts without its thread and its wire: the test decides what arrives before each step."""

from __future__ import annotations

import asyncio

import torch

from paceline.target import TargetEngine
from paceline.v1 import target_pb2
from services.verifier.budget import NodeBudget
from services.verifier.colocated import ColocatedDrafter
from services.verifier.feature_hub import FeatureHub, Subscriber
from services.verifier.inbox import Command, VerifierInbox
from services.verifier.kv_allocator import KVAllocatorStats
from services.verifier.loop import StepLoop
from services.verifier.report import StepEvent, StepStats
from services.verifier.session import VerifySession
from services.verifier.step import StepRunner
from services.verifier.table import SequenceLimits


def _closed_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.close()
    return loop


class ListedSession(VerifySession):
    """A stream whose frames are kept in a list."""

    def __init__(self, client_id: str = "test") -> None:
        super().__init__(_closed_loop(), client_id)
        self.frames: list[target_pb2.VerifyResponse] = []

    def push(self, frame: target_pb2.VerifyResponse) -> None:
        """Keep a frame; as on the wire, nobody changes it afterwards."""
        self.frames.append(frame)

    def take(self) -> list[target_pb2.VerifyResponse]:
        """Frames since the last call."""
        frames, self.frames = self.frames, []
        return frames


class ListedSubscriber(Subscriber):
    """A drafter's feature stream whose chunks are kept in a list."""

    def __init__(self, subscriber_id: str) -> None:
        super().__init__(_closed_loop(), subscriber_id)
        self.chunks: list[target_pb2.StreamFeaturesResponse] = []

    def push(self, frame: target_pb2.StreamFeaturesResponse) -> None:
        """Keep a chunk."""
        self.chunks.append(frame)

    def take(self) -> list[target_pb2.StreamFeaturesResponse]:
        """Chunks since the last call."""
        chunks, self.chunks = self.chunks, []
        return chunks


class SteppedVerifier:
    """Engine, features and step runner of one verifier; its thread runs only where a test starts it."""

    def __init__(
        self,
        engine: TargetEngine,
        *,
        drafter: ColocatedDrafter | None = None,
        max_sequences: int = 64,
        max_waiting: int = 64,
        prefix_cache_bytes: int = 1 << 20,
        kv_limit_tokens: int | None = None,
        budget: NodeBudget | None = None,
        ngram_tokens: int = 0,
    ) -> None:
        self.engine = engine
        self.inbox = VerifierInbox()
        self.features = FeatureHub(engine.project)
        self.stats: list[StepStats] = []
        self.kv_allocator = KVAllocatorStats()
        # What is verified follows from the seed alone here, not from how long a step took.
        budget = budget or NodeBudget(learns=False)
        limits = SequenceLimits(max_sequences, max_waiting, prefix_cache_bytes, ngram_tokens)
        self.runner = StepRunner(engine, self.inbox, self.features, drafter, budget, limits, self._on_step)
        self.table = self.runner.table
        self.calibrators = self.runner.calibrators
        self.limit_kv(kv_limit_tokens)

    def limit_kv(self, num_tokens: int | None) -> None:
        """Limit the cache to so many tokens' keys and values."""
        cache = self.engine.cache
        cache.limit_bytes = None if num_tokens is None else num_tokens * cache.layout.bytes_per_token

    def put(self, *commands: Command) -> None:
        """Send commands to the runner."""
        for command in commands:
            self.inbox.put(command)

    def step(self, count: int = 1, *, publishes: bool = True) -> int:
        """Run steps; returns how many found something to run. Without `publishes`, as the loop's own thread does."""
        num_run = 0
        for _ in range(count):
            with torch.inference_mode():
                num_run += self.runner.run()
            if publishes:
                self.runner.publish()
        return num_run

    def start(self) -> StepLoop:
        """Let a thread run the steps; the caller stops it."""
        loop = StepLoop(self.runner, self.inbox)
        loop.start()
        return loop

    def close(self) -> None:
        """Evict kept prefixes once every sequence has ended, and check that no slot is left."""
        assert self.table.num_unfinished == 0
        with torch.inference_mode():
            while self.table.kv_allocator.evict():
                pass
        assert self.engine.cache.num_slots == 0
        self.limit_kv(None)

    def _on_step(self, event: StepEvent) -> None:
        for session, frame in event.frames():
            session.push(frame)
        stats = event.stats
        self.stats.append(stats)
        for name in KVAllocatorStats.__dataclass_fields__:
            setattr(
                self.kv_allocator, name, getattr(self.kv_allocator, name) + getattr(stats.kv_allocator, name)
            )
