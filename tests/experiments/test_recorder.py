"""Recording a step trace: what was reported is what the trace says."""

from __future__ import annotations

import pytest

from experiments.planner.record import Frame, Recorder, trace_of
from experiments.planner.trace import Trace
from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.runtime.channel import open_channel
from services.runtime.process import Process
from services.scheduler.settings import SchedulerSettings
from tests.hosting import hosted


def report(rate: float, num_sequences: int, step_scale: float = 1.0) -> scheduler_pb2.ReportRequest:
    """A quarter of a second: steps of one row in 10 ms and of five in 12, drafts of 1 ms a token, a way of 0.4 ms."""
    passes = 400
    return scheduler_pb2.ReportRequest(
        steps=[
            scheduler_pb2.StepSample(num_rows=rows, num_sequences=1, step_us=round(us * step_scale))
            for rows, us in ((1, 10_000), (5, 12_000))
        ]
        * 4,
        drafts=[
            scheduler_pb2.DraftSample(num_draft_steps=k, num_sequences=1, draft_us=500 + 1000 * k)
            for k in (2, 4)
        ],
        round_trips_us=[400, 400],
        drafted_per_position=[passes] * 4,
        accepted_per_position=[round(passes * rate**k) for k in (1, 2, 3, 4)],
        num_running_sequences=num_sequences,
    )


def frames() -> list[Frame]:
    """Ten seconds: one sequence and likely text, then three and unlikely text."""
    first = [Frame(0.25 * i, report(0.8, 1)) for i in range(20)]
    first[0].report.key.placement = "separate"
    return first + [Frame(5 + 0.25 * i, report(0.4, 3)) for i in range(20)]


def mean_first(trace: Trace, begin_s: float, end_s: float) -> float:
    """Share of drafts whose first token was right."""
    drawn = [n > 0 for r in trace.rounds if begin_s <= r.t_s < end_s for n in r.right]
    return sum(drawn) / len(drawn)


def test_a_trace_says_what_was_reported() -> None:
    trace = trace_of(frames(), "two halves")
    assert "recorded" in trace.info.origin
    assert "drawn" in trace.info.origin
    assert trace.step_s(1) == pytest.approx(0.010)
    assert trace.step_s(5) == pytest.approx(0.012)
    assert trace.draft_s(4, 1) == pytest.approx(0.0045)
    assert trace.seconds == pytest.approx(10.0, abs=0.3)
    assert {r.num_sequences for r in trace.rounds if r.t_s < 4.9} == {1}
    assert {r.num_sequences for r in trace.rounds if r.t_s > 5.1} == {3}
    assert all(r.rtt_s == pytest.approx(0.0004) for r in trace.rounds)
    assert mean_first(trace, 0, 5) == pytest.approx(0.8, abs=0.06)
    assert mean_first(trace, 5, 10) == pytest.approx(0.4, abs=0.06)


def test_what_a_further_sequence_costs_is_what_a_further_path_costs() -> None:
    one = trace_of(frames(), "one at a time")
    assert one.draft_s(4, 3) == pytest.approx(0.0005 + 3 * 0.004)  # nothing says that they share
    shared = frames()
    for frame in shared[20:]:
        for draft in frame.report.drafts:
            draft.num_sequences = 3
            draft.draft_us += 2 * 200 * draft.num_draft_steps
    assert trace_of(shared, "shared").draft_s(4, 3) == pytest.approx(0.0005 + 0.004 + 2 * 0.0008, rel=0.02)


def test_slow_moments_are_slow_rounds() -> None:
    """Where all steps of some frames took twice as long, so do the rounds of that time."""
    mixed = [Frame(0.25 * i, report(0.8, 1, 2.0 if 8 <= i < 12 else 1.0)) for i in range(40)]
    trace = trace_of(mixed, "slow")
    slow = [r.step_scale for r in trace.rounds if 2.0 < r.t_s < 3.0]
    assert sum(slow) / len(slow) == pytest.approx(2.0, rel=0.05)


def test_too_little_is_no_trace() -> None:
    with pytest.raises(ValueError, match="too little"):
        trace_of([Frame(0.0, scheduler_pb2.ReportRequest())], "nothing")


async def test_conductors_can_report_to_a_recorder() -> None:
    """On the wire, as a conductor does it: watch the policy, stream reports."""
    recorder = Recorder(
        scheduler_pb2.SpeculationPolicy(draft_length=5, max_nodes_per_sequence=5, wait_budget_us=9),
        turn_s=0.01,
    )

    async def build(process: Process) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(recorder, process.server)
        await process.ready()

    settings = SchedulerSettings.model_validate({"port": 0, "metrics_port": None, "redis_url": ""})
    async with (
        hosted("scheduler", settings, build) as process,
        open_channel(f"127.0.0.1:{process.port}") as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        watching = stub.WatchPolicy(scheduler_pb2.WatchPolicyRequest(), timeout=20)
        policies = [(await watching.read()).policy for _ in range(3)]
        assert [(p.version, p.draft_length, p.wait_budget_us) for p in policies] == [
            (1, 5, 9),
            (2, 2, 9),
            (3, 5, 9),
        ]
        assert [p.max_nodes_per_sequence for p in policies] == [5, 2, 5]  # chains, all of them
        answer = await stub.Report(iter([f.report for f in frames()]), timeout=20)
        watching.cancel()
    assert answer.num_frames == len(recorder.frames) == 40
    assert recorder.frames[0].t_s == 0
    assert [f.t_s for f in recorder.frames] == sorted(f.t_s for f in recorder.frames)
