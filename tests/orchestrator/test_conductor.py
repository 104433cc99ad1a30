"""The conductor against scripted peers: what comes out is the target's text, whatever drafters do."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import pytest

from paceline.v1 import peer_pb2, sampling_pb2
from tests.orchestrator.conftest import Bench, Outcome, eventually, run_request
from tests.orchestrator.scripted_peers import ScriptedDrafter, ScriptedVerifier, continuation

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
    verifier.held_until_draft = True
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
    verifier.held_until_draft = True
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


async def test_hung_drafter_does_not_hold_text_and_holds_are_called_off(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter, drafter_silence_s=0.6)
    await bench.until(lambda _: verifier.policies and verifier.policies[-1].wait_budget_us > 0)
    drafter.is_silent = True
    running = asyncio.create_task(bench.run(run_request(PROMPT, 3000)))
    await eventually(lambda: verifier.policies[-1].wait_budget_us == 0)
    await bench.until(lambda status: not status.drafters)  # the watchdog gave it up
    drafter.is_silent = False
    await eventually(lambda: drafter.open)  # and it was opened again, with the text so far
    assert len(drafter.opens[-1].token_ids) > len(PROMPT)
    outcome = await running
    assert outcome.tokens == continuation(PROMPT, 3000)
    assert drafter.num_gaps == 0


async def test_killed_drafter_comes_back_with_the_text_so_far(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter)
    running = asyncio.create_task(bench.run(run_request(PROMPT, 3000)))
    await eventually(lambda: verifier.num_drafts > 5)
    await drafter.restart()
    await eventually(lambda: drafter.open)
    drafts_before = verifier.num_drafts
    await eventually(lambda: verifier.num_drafts > drafts_before)
    first, last = drafter.opens[0], drafter.opens[-1]
    assert last.epoch > first.epoch
    assert list(last.token_ids)[:20] == [*PROMPT, *continuation(PROMPT, 17)]
    assert (await running).tokens == continuation(PROMPT, 3000)


async def test_sequences_move_to_another_drafter(bench: Bench) -> None:
    verifier, first, second = ScriptedVerifier(), ScriptedDrafter(), ScriptedDrafter()
    await bench.start(verifier, first, second)
    tasks = [asyncio.create_task(bench.run(run_request([i + 1], 3000))) for i in range(4)]
    await eventually(lambda: len(first.open) == len(second.open) == 2)
    await first.stop()
    await eventually(lambda: len(second.open) == 4)
    for i, task in enumerate(tasks):
        assert (await task).tokens == continuation([i + 1], 3000)


async def test_drafters_share_the_outcomes_of_one_sequence(bench: Bench) -> None:
    verifier, drafters = ScriptedVerifier(), [ScriptedDrafter() for _ in range(3)]
    await bench.start(verifier, *drafters, drafters_per_sequence=2)
    running = asyncio.create_task(bench.run(run_request(PROMPT, 3000)))
    await eventually(lambda: sum(len(drafter.open) for drafter in drafters) == 2)
    first, second = sorted((d for d in drafters if d.open), key=lambda d: d.opens[-1].partition)
    assert [(d.opens[-1].partition, d.opens[-1].num_partitions) for d in (first, second)] == [(0, 2), (1, 2)]
    assert first.opens[-1].epoch != second.opens[-1].epoch
    await eventually(lambda: first.num_commits > 5 and second.num_commits > 5)
    spare = next(drafter for drafter in drafters if not drafter.opens)
    await second.stop()  # its share moves, and nothing else does
    await eventually(lambda: spare.open)
    assert spare.opens[-1].partition == 1
    assert len(first.opens) == 1
    await first.stop()  # drafts come first: the one that is left makes them
    await eventually(lambda: spare.opens[-1].partition == 0)
    assert (await running).tokens == continuation(PROMPT, 3000)
    assert spare.num_gaps == 0
    await eventually(lambda: not spare.open)


async def test_a_request_may_name_its_drafter(bench: Bench) -> None:
    verifier = ScriptedVerifier()
    fast, slow = ScriptedDrafter(drafter_name="fast"), ScriptedDrafter(drafter_name="slow")
    await bench.start(verifier, fast, slow)
    for _ in range(3):
        outcome = await bench.run(run_request(PROMPT, 30, speculation=use("slow")))
        assert outcome.tokens == continuation(PROMPT, 30)
    assert len(slow.opens) == 3
    assert not fast.opens
    with pytest.raises(grpc.aio.AioRpcError, match=r"speculation\.drafter") as refused:
        await bench.run(run_request(PROMPT, 30, speculation=use("none")))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await slow.stop()
    outcome = await bench.run(run_request(PROMPT, 30, speculation=use("slow")))  # it is known, but not there
    assert outcome.tokens == continuation(PROMPT, 30)
    assert not fast.opens


def use(drafter: str) -> sampling_pb2.SpeculationOptions:
    return sampling_pb2.SpeculationOptions(drafter=drafter)


async def test_stale_drafts_are_dropped_and_counted(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    drafter.is_stale = True
    await bench.start(verifier, drafter)
    outcome = await bench.run(run_request(PROMPT, 50))
    assert outcome.tokens == continuation(PROMPT, 50)
    assert verifier.num_drafts == 0
    await bench.until(lambda status: status.counters["num_stale_drafts"] > 0)


@pytest.mark.parametrize(("reason", "is_final"), [("OUT_OF_POSITIONS", True), ("FEATURES_LOST", False)])
async def test_failure_at_the_drafter_leaves_the_text_alone(
    bench: Bench, reason: str, is_final: bool
) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    drafter.failure_reason = reason
    length = 300 if is_final else 3000
    await bench.start(verifier, drafter)
    running = asyncio.create_task(bench.run(run_request(PROMPT, length)))
    await eventually(lambda: drafter.opens)
    if is_final:
        assert (await running).tokens == continuation(PROMPT, length)
        assert len(drafter.opens) == 1
        return
    drafter.failure_reason = ""
    await eventually(lambda: drafter.open)
    assert drafter.opens[-1].epoch > drafter.opens[0].epoch
    assert (await running).tokens == continuation(PROMPT, length)


async def test_drafter_for_another_target_is_refused(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter(model_fingerprint="0" * 64)
    await bench.start(verifier, drafter, wait_for_peers=False)
    await bench.until(lambda status: status.is_ready)
    outcome = await bench.run(run_request(PROMPT, 30))
    assert outcome.tokens == continuation(PROMPT, 30)
    assert not drafter.opens
    assert not bench.status.drafters


async def test_features_are_attached_where_the_method_reads_them(bench: Bench) -> None:
    tap = peer_pb2.FeatureTap(layers=[1, 2], width=8, projection_fingerprint="p")
    verifier, drafter = ScriptedVerifier(tap=tap), ScriptedDrafter(tap=tap)
    await bench.start(verifier, drafter)
    await bench.run(run_request(PROMPT, 30))
    assert drafter.opens[0].verifier_endpoint == verifier.endpoint
    assert drafter.opens[0].verifier_instance_id == verifier.info.instance_id
    attach = verifier.attaches[0]
    assert (attach.subscriber_id, attach.start) == (drafter.info.instance_id, 0)
    assert attach.sequence_id == drafter.opens[0].sequence_id


async def test_drafters_may_reach_the_verifier_under_another_address(bench: Bench) -> None:
    tap = peer_pb2.FeatureTap(layers=[1, 2], width=8, projection_fingerprint="p")
    verifier, drafter = ScriptedVerifier(tap=tap), ScriptedDrafter(tap=tap)
    await bench.start(verifier, drafter, feature_endpoints=("proxy:7",))
    await bench.run(run_request(PROMPT, 30))
    assert drafter.opens[0].verifier_endpoint == "proxy:7"
    assert drafter.opens[0].verifier_instance_id == verifier.info.instance_id


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


async def test_colocated_placement_uses_no_drafter(bench: Bench) -> None:
    verifier = ScriptedVerifier(method="eagle3")
    await bench.start(verifier, draft_length=5)
    await eventually(lambda: verifier.policies)
    assert bench.status.placement == "colocated"
    assert verifier.policies[-1].colocated_draft_length == 5
    assert verifier.policies[-1].wait_budget_us > 0


async def test_verifier_that_comes_back_with_another_model_loses_its_drafters(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter)
    verifier.info_changes["model_fingerprint"] = "1" * 64
    await verifier.restart()
    await bench.until(lambda status: status.is_ready and not status.drafters)
    outcome = await bench.run(run_request(PROMPT, 30))
    assert outcome.tokens == continuation(PROMPT, 30)
    assert not drafter.opens


async def test_running_request_does_not_go_on_with_another_model(bench: Bench) -> None:
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
    await bench.until(lambda status: status.is_ready)  # with nothing left to go on, the new model is served


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
    )  # the caller may send it again, as nothing was said
    assert len(verifier.opens) == 1
