"""The conductor against scripted peers: what comes out is the target's text, whatever drafters do."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import pytest

from paceline.v1 import sampling_pb2
from tests.orchestrator.conftest import Bench, Outcome, eventually, run_request
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_peers import continuation
from tests.orchestrator.scripted_verifier import ScriptedVerifier

PROMPT = [5, 6, 7]


def greedy(**fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        temperature=0.0, seed=1, mode=sampling_pb2.VERIFY_MODE_GREEDY, **fields
    )


LENGTH = sampling_pb2.FINISH_REASON_LENGTH


STOP = sampling_pb2.FINISH_REASON_STOP


async def test_text_without_drafters(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier)
    outcome = await bench.run(run_request(PROMPT, 20))
    assert outcome.tokens == continuation(PROMPT, 20)
    assert (outcome.reason, outcome.num_ends) == (LENGTH, 1)
    assert outcome.stats.num_target_passes == 20
    assert outcome.stats.num_prompt_tokens == 3
    assert outcome.stats.num_generated_tokens == 20
    assert outcome.stats.num_draft_tokens == 0
    assert bench.status.placement == "none"
    assert not verifier.running


async def test_drafts_save_passes_and_are_counted_by_position(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    verifier.waits_for_drafts = True
    await bench.start(verifier, drafter, draft_length=3)
    outcome = await bench.run(run_request(PROMPT, 24))
    assert outcome.tokens == continuation(PROMPT, 24)
    stats = outcome.stats
    assert stats.num_target_passes == 6
    assert stats.num_draft_tokens == 18
    assert stats.num_accepted_tokens == 18
    assert list(stats.drafted_per_position) == [6, 6, 6]
    assert list(stats.accepted_per_position) == [6, 6, 6]
    assert stats.time_to_first_token_us > 0
    assert drafter.num_gaps == 0
    await eventually(lambda: not drafter.open)


async def test_wrong_drafts_change_nothing(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    verifier.waits_for_drafts = True
    drafter.is_wrong = True
    await bench.start(verifier, drafter)
    outcome = await bench.run(run_request(PROMPT, 12))
    assert outcome.tokens == continuation(PROMPT, 12)
    assert outcome.stats.num_draft_tokens > 0
    assert outcome.stats.num_accepted_tokens == 0
    assert list(outcome.stats.accepted_per_position) == []


async def test_stop_token_ends_the_text(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier)
    expected = continuation(PROMPT, 30)
    outcome = await bench.run(run_request(PROMPT, 30, stop_token_ids=[expected[9]]))
    assert outcome.tokens == expected[: expected.index(expected[9]) + 1]
    assert outcome.reason == STOP


async def test_many_requests_share_one_stream(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter)
    prompts = [[i + 1, 2 * i + 1] for i in range(16)]
    outcomes = await asyncio.gather(*(bench.run(run_request(prompt, 30)) for prompt in prompts))
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.tokens == continuation(prompt, 30)
        assert outcome.num_ends == 1
    assert len(verifier.hellos) == 1
    await eventually(lambda: not drafter.open)
    await bench.until(lambda status: status.num_running == 0)


async def test_request_without_speculation_never_reaches_a_drafter(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter)
    outcome = await bench.run(
        run_request(PROMPT, 10, speculation=sampling_pb2.SpeculationOptions(disabled=True))
    )
    assert outcome.tokens == continuation(PROMPT, 10)
    assert verifier.opens[0].max_draft_nodes == 0
    assert not drafter.opens


async def test_request_bounds_its_draft_length(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter)
    await bench.run(run_request(PROMPT, 10, speculation=sampling_pb2.SpeculationOptions(max_draft_tokens=2)))
    assert verifier.opens[0].max_draft_nodes == 2
    assert drafter.opens[0].max_draft_tokens == 2


async def test_cancelled_request_closes_at_both_ends(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter)
    call = bench.stub.Run(run_request(PROMPT, 4000), timeout=20)
    assert (await call.read()).token_ids
    assert verifier.running
    assert drafter.open
    call.cancel()
    await eventually(lambda: not verifier.running and not drafter.open)
    assert verifier.closed == [1]
    await bench.until(lambda status: status.num_running == 0)
    assert bench.status.counters["finished_cancelled"] == 1


async def test_resumed_run_streams_only_what_is_new(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier)
    text = continuation(PROMPT, 30)
    outcome = await bench.run(run_request([*PROMPT, *text[:12]], 30, num_resumed_tokens=12))
    assert outcome.tokens == text[12:]
    assert outcome.stats.num_prompt_tokens == len(PROMPT)
    assert outcome.stats.num_generated_tokens == 30


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [997]}, "prompt_token_ids"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 4094}, "max_new_tokens"),
        ({"num_resumed_tokens": 3}, "num_resumed_tokens"),
        ({"sampling": sampling_pb2.SamplingParams()}, "sampling"),
        ({"sampling": greedy(logit_bias={997: 1.0})}, "sampling.logit_bias[997]"),
        ({"sampling": greedy(bad_runs=[{"token_ids": [1, 997]}])}, "sampling.bad_runs[0].token_ids[1]"),
        ({"sampling": greedy(presence_penalty=3.0)}, "sampling.presence_penalty"),
        ({"stop_token_ids": [997]}, "stop_token_ids"),
        ({"log_probs": sampling_pb2.LogProbOptions(num_top=21)}, "log_probs.num_top"),
        (
            {"speculation": sampling_pb2.SpeculationOptions(max_draft_tokens=65)},
            "speculation.max_draft_tokens",
        ),
    ],
)
async def test_invalid_request_is_refused_naming_the_field(
    bench: Bench, changes: dict[str, object], field: str
) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier)
    with pytest.raises(grpc.aio.AioRpcError, match=re.escape(field)) as raised:
        await bench.run(run_request(**({"prompt": PROMPT, "max_new_tokens": 10} | changes)))  # type: ignore[arg-type]
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not verifier.opens


async def test_drain_finishes_what_runs(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier)
    running = asyncio.create_task(bench.run(run_request(PROMPT, 300)))
    await eventually(lambda: verifier.running)
    await bench.conductor.shutdown(10.0)
    outcome = await running
    assert outcome.tokens == continuation(PROMPT, 300)
    assert outcome.reason == LENGTH


async def test_drain_bound_ends_what_is_left_with_an_error(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    await bench.start(verifier)
    outcome = Outcome()
    running = asyncio.create_task(bench.run(run_request(PROMPT, 4000), outcome=outcome))
    await eventually(lambda: outcome.tokens)
    verifier.is_paused = True
    await bench.conductor.shutdown(0.2)
    await running
    assert outcome.reason == sampling_pb2.FINISH_REASON_ERROR
    assert outcome.tokens == continuation(PROMPT, len(outcome.tokens))


async def test_idle_streams_are_kept_by_heartbeats(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter, lease_s=1.0)
    frames = verifier.num_frames
    await eventually(lambda: verifier.num_frames >= frames + 3)
    assert verifier.hellos[0].lease_ms == 1000
    assert bench.status.is_ready
