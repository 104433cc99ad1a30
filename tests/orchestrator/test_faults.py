"""Seeded faults while requests run: every text is the fault-free one, every request ends once, nothing is left."""

from __future__ import annotations

import asyncio
import random

import pytest

from paceline.v1 import sampling_pb2
from tests.orchestrator.conftest import Bench, eventually, run_request
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_peers import continuation
from tests.orchestrator.scripted_verifier import ScriptedVerifier

NUM_REQUESTS = 6
LENGTH = 900


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_text_is_the_fault_free_text(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    verifier, drafters = ScriptedVerifier(), [ScriptedDrafter(), ScriptedDrafter()]
    await bench.start(
        verifier, *drafters, max_resumes=50, resume_timeout_s=20.0, drafter_silence_s=0.3, draft_length=3
    )
    prompts = [[rng.randrange(1, 900) for _ in range(3)] for _ in range(NUM_REQUESTS)]
    running = [asyncio.create_task(bench.run(run_request(prompt, LENGTH))) for prompt in prompts]
    injected = 0
    while not all(task.done() for task in running) and injected < 12:
        drafter = rng.choice(drafters)
        fault = rng.randrange(6)
        if fault == 0:
            verifier.max_tokens_before_break = rng.randrange(1, 60)
        elif fault == 1:
            await drafter.restart()
        elif fault == 2:
            drafter.is_silent = not drafter.is_silent
        elif fault == 3:
            drafter.is_wrong = not drafter.is_wrong
        elif fault == 4:
            drafter.is_stale = not drafter.is_stale
        else:
            drafter.failure_reason = rng.choice(["", "FEATURES_LOST", "CAPACITY_EXHAUSTED"])
        injected += 1
        await asyncio.wait(running, timeout=rng.uniform(0.02, 0.12), return_when=asyncio.FIRST_COMPLETED)
    assert injected >= 5
    for prompt, task in zip(prompts, running, strict=True):
        outcome = await task
        assert outcome.tokens == continuation(prompt, LENGTH)
        assert (outcome.reason, outcome.num_ends) == (sampling_pb2.FINISH_REASON_LENGTH, 1)
    for drafter in drafters:
        drafter.is_silent = False
        assert drafter.num_gaps == 0
    await bench.until(lambda status: status.num_running == 0)
    await eventually(lambda: not verifier.running and not any(drafter.open for drafter in drafters))


async def test_cancelled_requests_leave_nothing(bench: Bench) -> None:
    rng = random.Random(7)
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter)

    async def cancel_one(i: int) -> None:
        call = bench.stub.Run(run_request([i + 1, 3], 4000), timeout=20)
        for _ in range(rng.randrange(4)):
            await call.read()
        call.cancel()

    for batch in range(10):
        await asyncio.gather(*(cancel_one(10 * batch + i) for i in range(10)))
    await bench.until(lambda status: status.num_running == 0)
    await eventually(lambda: not verifier.running and not drafter.open)
    assert (await bench.run(run_request([5], 10))).tokens == continuation([5], 10)
