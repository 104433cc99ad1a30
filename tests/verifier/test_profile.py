"""The profile at start: bounded, telling, and without a trace in the engine."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import torch

from paceline import PROTOCOL_VERSION
from paceline.scheduling import StepCurve
from paceline.target import SequenceRows, TargetEngine
from paceline.v1 import peer_pb2, target_pb2, target_pb2_grpc
from services.runtime.channel import open_channel
from services.runtime.process import Process
from services.verifier.profile import profile_steps


def test_it_covers_rows_sequences_and_context(target_dir: Path) -> None:
    engine = TargetEngine.load(target_dir, dtype=torch.float32)
    timed = profile_steps(engine, 30.0)
    assert {step.num_rows for step in timed} >= {1, 2, 5, 9, 13, 20}
    assert {step.num_sequences for step in timed} == {1, 2, 4}
    assert len({step.num_context_tokens // step.num_sequences for step in timed}) == 2
    assert all(step.step_us > 0 for step in timed)
    curve = StepCurve.fit((s.num_rows, s.step_us / 1e6, s.num_sequences, s.num_context_tokens) for s in timed)
    assert 0 < curve.seconds(1) <= curve.seconds(64)
    assert engine.cache.used_bytes == 0
    slot = engine.open()
    assert engine.step([SequenceRows(slot, [1, 2, 3], num_logits="last")]).logits[0].shape[0] == 1


def test_it_ends_in_time(target_dir: Path) -> None:
    engine = TargetEngine.load(target_dir, dtype=torch.float32)
    assert profile_steps(engine, 0.0) == []
    ticks = itertools.count()
    few = profile_steps(
        engine, 30.0, lambda: float(next(ticks))
    )  # a second passes with each look at the clock
    assert next(ticks) < 60
    assert len(few) < 20
    assert engine.cache.used_bytes == 0


def test_a_cache_that_is_too_small_ends_it(target_dir: Path) -> None:
    engine = TargetEngine.load(target_dir, dtype=torch.float32, kv_limit_bytes=60_000)
    profile_steps(engine, 30.0)
    assert engine.cache.used_bytes == 0


async def test_the_first_stream_alone_is_told(verifier: Process) -> None:
    told = []
    async with open_channel(f"127.0.0.1:{verifier.port}") as channel:
        for _ in range(2):
            call = target_pb2_grpc.TargetServiceStub(channel).Verify()
            hello = peer_pb2.StreamHello(protocol_version=PROTOCOL_VERSION, client_id="t", lease_ms=5000)
            await call.write(target_pb2.VerifyRequest(hello=hello))
            frame = await asyncio.wait_for(call.read(), 20)
            assert frame.HasField("hello")
            told.append(len(frame.profile.num_rows))
            call.cancel()
    assert told[0] > 10
    assert told[1] == 0
