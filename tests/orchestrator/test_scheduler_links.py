"""What passes between a conductor and the scheduler, with a scripted scheduler on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
import pytest_asyncio

from paceline.v1 import peer_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.orchestrator.conftest import Bench, eventually, run_request
from tests.orchestrator.scripted_drafter import ScriptedDrafter
from tests.orchestrator.scripted_peers import Server, continuation
from tests.orchestrator.scripted_verifier import ScriptedVerifier

PROMPT = [5, 6, 7]


class ScriptedScheduler(Server, scheduler_pb2_grpc.SchedulerServiceServicer):
    """Publishes the policy it is given and keeps the reports."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = scheduler_pb2.SpeculationPolicy(version=1, draft_length=2, max_nodes_per_sequence=2)
        self.keys: list[scheduler_pb2.MeasurementKey] = []
        self.reports: list[scheduler_pb2.ReportRequest] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    async def WatchPolicy(
        self, request: scheduler_pb2.WatchPolicyRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchPolicyResponse]:
        self.keys.append(request.key)
        sent = 0
        while True:
            await eventually(lambda: self.policy.version > sent, timeout_s=60)  # noqa: B023
            sent = self.policy.version
            yield scheduler_pb2.WatchPolicyResponse(policy=self.policy)

    async def Report(
        self, request_iterator: AsyncIterator[scheduler_pb2.ReportRequest], context: Any
    ) -> scheduler_pb2.ReportResponse:
        async for report in request_iterator:
            self.reports.append(report)
        return scheduler_pb2.ReportResponse(num_frames=len(self.reports))


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    """A running scheduler."""
    async with AsyncExitStack() as stack:
        scripted = ScriptedScheduler()
        await scripted.start()
        stack.push_async_callback(scripted.stop)
        yield scripted


async def test_policy_reaches_both_peers_and_measurements_come_back(
    bench: Bench, scheduler: ScriptedScheduler
) -> None:
    verifier = ScriptedVerifier(dtype="bfloat16", device=peer_pb2.DeviceInfo(name="processor"))
    drafter = ScriptedDrafter(longest_draft=3)
    await bench.start(verifier, drafter, scheduler=scheduler.endpoint)
    await eventually(lambda: drafter.plans and drafter.plans[-1].version == 1)
    await eventually(lambda: verifier.policies and verifier.policies[-1].version == 1)
    assert drafter.plans[-1].draft_length == 2
    assert verifier.policies[-1].max_nodes_per_sequence == 2
    key = scheduler.keys[0]
    assert (key.dtype, key.device_name, key.method, key.placement) == (
        "bfloat16",
        "processor",
        "scripted",
        "separate",
    )
    verifier.waits_for_drafts = True
    await bench.run(run_request(PROMPT, 60))
    await eventually(lambda: sum(len(report.steps) for report in scheduler.reports) >= 20)
    assert scheduler.reports[0].key == key
    assert scheduler.reports[0].longest_draft == 3
    await eventually(lambda: any(report.round_trips_us for report in scheduler.reports))
    assert any(report.drafts for report in scheduler.reports)

    def drafted(depth: int) -> int:
        counts = [report.drafted_per_position for report in scheduler.reports]
        return sum(count[depth] for count in counts if len(count) > depth)

    await eventually(lambda: drafted(0) == 20)
    assert (drafted(1), drafted(2)) == (20, 0)


async def test_a_policy_is_in_force_once_one_came_for_the_drafter_in_use(
    bench: Bench, scheduler: ScriptedScheduler
) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await drafter.start()
    await drafter.stop()
    await bench.start(
        verifier, wait_for_peers=False, drafters=(drafter.endpoint,), scheduler=scheduler.endpoint
    )
    await bench.until(lambda status: status.is_ready)
    assert not bench.status.has_policy  # ready without its drafter, and so without a policy for it
    await drafter.start()
    await bench.until(lambda status: status.drafters and status.has_policy)
    await drafter.stop()


async def test_without_a_scheduler_the_default_policy_is_in_force(bench: Bench) -> None:
    await bench.start(ScriptedVerifier(), ScriptedDrafter())
    assert bench.status.has_policy


async def test_text_does_not_need_the_scheduler_and_the_last_policy_stays(
    bench: Bench, scheduler: ScriptedScheduler
) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter, scheduler=scheduler.endpoint)
    await eventually(lambda: drafter.plans and drafter.plans[-1].version == 1)
    await scheduler.stop()
    assert (await bench.run(run_request(PROMPT, 300))).tokens == continuation(PROMPT, 300)
    assert drafter.plans[-1].version == 1
    await drafter.restart()  # a drafter that comes back gets the policy in force, not the default
    plans = len(drafter.plans)
    await eventually(lambda: len(drafter.plans) > plans)
    assert drafter.plans[-1].version == 1
    scheduler.policy = scheduler_pb2.SpeculationPolicy(version=7, draft_length=0)
    await scheduler.start()
    await eventually(lambda: drafter.plans[-1].version == 7)
    assert drafter.plans[-1].draft_length == 0
    assert (await bench.run(run_request(PROMPT, 30))).tokens == continuation(PROMPT, 30)


async def test_drafters_are_left_alone_while_drafting_is_off_and_catch_up(
    bench: Bench, scheduler: ScriptedScheduler
) -> None:
    verifier, drafter = ScriptedVerifier(), ScriptedDrafter()
    await bench.start(verifier, drafter, scheduler=scheduler.endpoint)
    await eventually(lambda: drafter.plans and drafter.plans[-1].version == 1)

    async def set_policy(version: int, draft_length: int) -> None:
        scheduler.policy = scheduler_pb2.SpeculationPolicy(
            version=version, draft_length=draft_length, max_nodes_per_sequence=draft_length
        )
        await eventually(lambda: drafter.plans[-1].version == version)

    running = asyncio.create_task(bench.run(run_request(PROMPT, 4000), timeout_s=60.0))
    await eventually(lambda: drafter.num_commits > 3)
    await set_policy(2, 0)
    num_steps, num_commits = verifier.num_steps, drafter.num_commits
    late = asyncio.create_task(bench.run(run_request([9, 8], 4000, request_id="late"), timeout_s=60.0))
    await eventually(lambda: verifier.num_steps > num_steps + 20)
    assert drafter.num_commits == num_commits
    assert len(drafter.opens) == 1  # what came while it is off is not opened there
    await set_policy(3, 2)
    await eventually(lambda: len(drafter.opens) == 2 and drafter.num_commits > num_commits + 3)
    assert drafter.num_gaps == 0
    assert (await running).tokens == continuation(PROMPT, 4000)
    assert (await late).tokens == continuation([9, 8], 4000)
    assert drafter.num_gaps == 0


@pytest.mark.parametrize(("width", "outcomes", "is_counted"), [(64, 4, False), (64, 0, True), (0, 4, True)])
async def test_hits_drafted_without_features_do_not_count_as_drafts_with_them(
    width: int, outcomes: int, is_counted: bool, bench: Bench, scheduler: ScriptedScheduler
) -> None:
    """The planner takes off what that costs; counted as well, it would be taken off twice."""
    tap = peer_pb2.FeatureTap(layers=[1], width=width) if width else peer_pb2.FeatureTap()
    verifier, drafter = ScriptedVerifier(tap=tap), ScriptedDrafter(tap=tap)
    scheduler.policy = scheduler_pb2.SpeculationPolicy(
        version=1, draft_length=2, max_nodes_per_sequence=2, draft_ahead=2, num_outcomes=outcomes
    )
    await bench.start(verifier, drafter, scheduler=scheduler.endpoint)
    await eventually(lambda: drafter.plans and drafter.plans[-1].version == 1)
    verifier.waits_for_drafts = verifier.has_hits = True
    assert (await bench.run(run_request(PROMPT, 60))).tokens == continuation(PROMPT, 60)

    def drafted() -> int:
        return sum(
            report.drafted_per_position[0] for report in scheduler.reports if report.drafted_per_position
        )

    await eventually(lambda: sum(len(report.steps) for report in scheduler.reports) >= 20)
    if is_counted:
        await eventually(lambda: drafted() == 20)
    else:  # all but the first: no step before it reported a hit
        await eventually(lambda: drafted() == 1)
