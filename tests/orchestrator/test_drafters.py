"""Drafters of a conductor: lost, slow, wrong, named, and several at once; the text is the target's in every case."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from paceline.v1 import peer_pb2, sampling_pb2
from tests.orchestrator.conftest import Bench, eventually, run_request
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_peers import continuation
from tests.orchestrator.scripted_verifier import ScriptedVerifier

PROMPT = [5, 6, 7]


async def test_a_hung_drafter_delays_no_text_and_draft_waits_are_called_off(bench: Bench) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter, drafter_silence_s=0.6)
    await bench.until(lambda _: verifier.policies and verifier.policies[-1].wait_budget_us > 0)
    drafter.is_silent = True
    running = asyncio.create_task(bench.run(run_request(PROMPT, 3000)))
    await eventually(lambda: verifier.policies[-1].wait_budget_us == 0)
    await bench.until(lambda status: not status.drafters)  # the watchdog gave it up
    drafter.is_silent = False
    # It is opened again, with the text so far. Its old stream may end only after the conductor has given it up.
    await eventually(lambda: drafter.open and len(drafter.opens) > 1)
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


async def test_drafters_partition_the_outcomes_of_one_sequence(bench: Bench) -> None:
    verifier, drafters = ScriptedVerifier(), [ScriptedDrafter() for _ in range(3)]
    await bench.start(verifier, *drafters, drafters_per_sequence=2)
    running = asyncio.create_task(bench.run(run_request(PROMPT, 3000)))
    await eventually(lambda: sum(len(drafter.open) for drafter in drafters) == 2)
    first, second = sorted((d for d in drafters if d.open), key=lambda d: d.opens[-1].partition)
    assert [(d.opens[-1].partition, d.opens[-1].num_partitions) for d in (first, second)] == [(0, 2), (1, 2)]
    assert first.opens[-1].epoch != second.opens[-1].epoch
    await eventually(lambda: first.num_commits > 5 and second.num_commits > 5)
    spare = next(drafter for drafter in drafters if not drafter.opens)
    await second.stop()  # its partition moves, and nothing else does
    await eventually(lambda: spare.open)
    assert spare.opens[-1].partition == 1
    assert len(first.opens) == 1
    await first.stop()  # drafts come first: the drafter that is left makes them
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


async def test_colocated_placement_uses_no_drafter(bench: Bench) -> None:
    verifier = ScriptedVerifier(method="eagle3")
    await bench.start(verifier, draft_length=5)
    await eventually(lambda: verifier.policies)
    assert bench.status.placement == "colocated"
    assert verifier.policies[-1].draft_length == 5
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
