"""A verifier that is lost, refuses or comes back: a request continues or ends once."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from paceline.v1 import peer_pb2, sampling_pb2
from tests.orchestrator.conftest import Bench, Outcome, eventually, run_request
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_peers import continuation
from tests.orchestrator.scripted_verifier import ScriptedVerifier

PROMPT = [5, 6, 7]


LENGTH = sampling_pb2.FINISH_REASON_LENGTH


async def test_request_survives_a_verifier_restart(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter)
    running = asyncio.create_task(bench.run(run_request(PROMPT, 3000)))
    await eventually(lambda: verifier.num_drafts > 5)
    await verifier.restart()
    outcome = await running
    assert outcome.tokens == continuation(PROMPT, 3000)
    assert (outcome.reason, outcome.num_ends) == (LENGTH, 1)
    first, second = verifier.opens[0], verifier.opens[1]
    assert (first.epoch, first.num_resumed_tokens) == (0, 0)
    assert second.epoch == 1
    assert second.num_resumed_tokens == len(second.prompt_token_ids) - len(PROMPT) > 0
    assert second.max_new_tokens == 3000
    assert drafter.num_gaps == 0
    assert outcome.stats.num_prompt_tokens == len(PROMPT)
    assert outcome.stats.num_generated_tokens == 3000


async def test_request_that_breaks_the_verifier_again_and_again_ends_with_an_error(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier, max_resumes=2)

    async def break_often() -> None:
        while True:
            if verifier.max_tokens_before_break is None:
                verifier.max_tokens_before_break = 10
            await asyncio.sleep(0.001)

    breaking = asyncio.create_task(break_often())
    outcome = await bench.run(run_request(PROMPT, 3000))
    breaking.cancel()
    assert outcome.reason == sampling_pb2.FINISH_REASON_ERROR
    assert outcome.num_ends == 1
    assert outcome.tokens == continuation(PROMPT, len(outcome.tokens))
    assert len(verifier.opens) == 3


async def test_no_verifier_ends_a_request_in_bounded_time(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier, resume_timeout_s=0.3)
    await verifier.stop()
    await bench.until(lambda status: not status.is_ready)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await bench.run(run_request(PROMPT, 10))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("code", "status"), [(8, grpc.StatusCode.RESOURCE_EXHAUSTED), (3, grpc.StatusCode.INVALID_ARGUMENT)]
)
async def test_refused_opening_becomes_a_status(bench: Bench, code: int, status: grpc.StatusCode) -> None:
    verifier = ScriptedVerifier()
    verifier.refusal = peer_pb2.SequenceFailure(
        code=code, reason="SCRIPTED", message="sampling.top_k: scripted"
    )
    await bench.start(verifier)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await bench.run(run_request(PROMPT, 10))
    assert raised.value.code() is status
    await bench.until(lambda now: now.num_running == 0)


async def test_a_running_request_does_not_continue_with_another_model(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier, resume_timeout_s=0.5)
    outcome = Outcome()
    running = asyncio.create_task(bench.run(run_request(PROMPT, 4000), outcome=outcome))
    await eventually(lambda: outcome.tokens)
    verifier.info_changes["model_fingerprint"] = "1" * 64
    await verifier.restart()
    await running
    assert outcome.reason == sampling_pb2.FINISH_REASON_ERROR
    assert outcome.tokens == continuation(PROMPT, len(outcome.tokens))
    assert len(verifier.opens) == 1
    await bench.until(lambda status: status.is_ready)  # with no request left, the new model is served


async def test_request_without_a_token_fails_whole_where_another_model_comes_back(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier, resume_timeout_s=0.5)
    verifier.is_paused = True
    running = asyncio.create_task(bench.run(run_request(PROMPT, 4000)))
    await eventually(lambda: verifier.running)
    verifier.info_changes["model_fingerprint"] = "1" * 64
    await verifier.restart()
    with pytest.raises(grpc.aio.AioRpcError, match="another model") as raised:
        await running
    assert (
        raised.value.code() is grpc.StatusCode.UNAVAILABLE
    )  # the caller may send it again: it has no token yet
    assert len(verifier.opens) == 1
