"""Log-probabilities reach the reader of a run once for each token, whatever happens to the verifier."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from paceline.v1 import orchestrator_pb2, sampling_pb2
from tests.orchestrator.conftest import Bench, Outcome, eventually, run_request
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_peers import continuation, log_probs_of
from tests.orchestrator.scripted_verifier import ScriptedVerifier

PROMPT = list(range(3, 60))
OPTIONS = sampling_pb2.LogProbOptions(num_top=2, num_prompt_top=3)


def assert_complete(outcome: Outcome, tokens: list[int]) -> None:
    assert outcome.tokens == tokens
    assert outcome.log_probs == log_probs_of(tokens, 2)
    assert outcome.prompt_log_probs == log_probs_of(PROMPT[1:], 3)


@pytest.mark.parametrize("chunk", [1, 10, 1000])
async def test_they_come_with_their_tokens(bench: Bench, chunk: int) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    verifier.prompt_chunk = chunk
    await bench.start(verifier, drafter)
    outcome = await bench.run(run_request(PROMPT, 50, log_probs=OPTIONS))
    assert_complete(outcome, continuation(PROMPT, 50))


async def test_the_prompts_come_no_later_than_the_first_token(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    verifier.prompt_chunk = 7
    await bench.start(verifier)
    num_known = 0
    async for frame in bench.stub.Run(run_request(PROMPT, 5, log_probs=OPTIONS), timeout=20):
        num_known += len(frame.prompt_log_probs.log_probs)
        assert not frame.token_ids or num_known == len(PROMPT) - 1


async def test_they_survive_verifier_breaks_anywhere(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    verifier.prompt_chunk = 9
    await bench.start(verifier, max_resumes=50)
    for num_tokens in (1, 20, 50, 57, 58, 70, 200):
        verifier.max_tokens_before_break = num_tokens
        outcome = await bench.run(run_request(PROMPT, 300, log_probs=OPTIONS))
        assert_complete(outcome, continuation(PROMPT, 300))


async def test_a_restarted_verifier_is_not_asked_for_the_prompts_again(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter)
    running = asyncio.create_task(bench.run(run_request(PROMPT, 2000, log_probs=OPTIONS)))
    await eventually(lambda: verifier.num_drafts > 5)
    await verifier.restart()
    assert_complete(await running, continuation(PROMPT, 2000))
    first, second = verifier.opens
    assert first.log_probs == OPTIONS
    assert second.log_probs == sampling_pb2.LogProbOptions(num_top=2)


async def test_a_run_that_goes_on_reports_the_new_tokens_alone(bench: Bench) -> None:
    await bench.start(ScriptedVerifier())
    text = continuation(PROMPT, 30)
    request = run_request(
        PROMPT + text[:12], 30, num_resumed_tokens=12, log_probs=sampling_pb2.LogProbOptions(num_top=2)
    )
    outcome = await bench.run(request)
    assert outcome.log_probs == log_probs_of(text[12:], 2)
    assert not outcome.prompt_log_probs.log_probs


async def test_who_does_not_ask_gets_none(bench: Bench) -> None:
    await bench.start(ScriptedVerifier())
    async for frame in bench.stub.Run(run_request(PROMPT, 5), timeout=20):
        assert isinstance(frame, orchestrator_pb2.RunResponse)
        assert not frame.HasField("log_probs")
        assert not frame.HasField("prompt_log_probs")


async def test_a_verifier_that_leaves_them_out_is_at_fault(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    verifier.has_log_probs = False
    await bench.start(verifier, max_resumes=1)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await bench.run(run_request(PROMPT, 5, log_probs=OPTIONS))
    assert "log-probabilities" in (raised.value.details() or "")
