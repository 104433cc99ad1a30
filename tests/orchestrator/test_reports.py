"""Measurements for the scheduler: samples in, one frame out."""

from __future__ import annotations

from orchestrator.draft_acceptance import AcceptanceCounter
from orchestrator.reports import MAX_SAMPLES, Reports
from paceline.v1 import drafter_pb2, generation_pb2, peer_pb2, scheduler_pb2, target_pb2
from services.scheduler.reports import measurements_of


def test_reports_are_bounded_and_complete() -> None:
    key = scheduler_pb2.MeasurementKey(method="scripted")
    reports = Reports(lambda: key)
    assert reports.take() is None
    for i in range(MAX_SAMPLES + 10):
        step = target_pb2.StepReport(num_rows=i + 1, num_sequences=2, num_context_tokens=9, step_us=100)
        reports.step(step, [(3, 2)], num_running=5, draft_length=4)
    answer = drafter_pb2.DraftResponse(num_draft_steps=4, num_sequences=2, draft_us=900, wait_us=30)
    reports.draft(answer, 250, "near:1")
    reports.draft(drafter_pb2.DraftResponse(frame_id=2), 700, "far:1")
    reports.draft(drafter_pb2.DraftResponse(frame_id=1), None)
    frame = reports.take()
    assert frame is not None
    assert frame.key == key
    assert len(frame.steps) == MAX_SAMPLES
    assert frame.steps[0].num_rows == 11
    assert reports.num_dropped == 10
    assert list(frame.round_trips_us) == [250, 700]
    assert [frame.peers[i].drafter for i in frame.round_trip_peers] == ["near:1", "far:1"]
    assert [
        (frame.peers[i].drafter, us) for i, us in zip(frame.queue_peers, frame.queues_us, strict=True)
    ] == [("near:1", 30)]
    assert [(d.num_draft_steps, d.num_sequences, d.draft_us) for d in frame.drafts] == [(4, 2, 900)]
    assert list(frame.drafted_per_position) == [MAX_SAMPLES + 10] * 3
    assert list(frame.accepted_per_position) == [MAX_SAMPLES + 10] * 2
    assert frame.num_running_sequences == 5
    assert reports.take() is None


def packed(position: int, own: int, calibrated: int, accepted: int) -> int:
    return position << 17 | own << 9 | calibrated << 1 | accepted


def test_acceptance_samples_are_counted_by_drafter_and_cell() -> None:
    reports = Reports(lambda: None)
    reports.acceptance.add(
        "eagle3/ab", [packed(0, 200, 150, 1), packed(0, 200, 150, 0), packed(1, 90, 40, 0)]
    )
    reports.acceptance.add("medusa", [packed(63, 255, 255, 1)])
    reports.acceptance.add("eagle3/ab", [])
    frame = reports.take()
    assert frame is not None
    one, other = frame.acceptance
    assert (one.drafter, list(one.cells), list(one.trials), list(one.accepted)) == (
        *("eagle3/ab", [200, 256 + 90], [2, 1], [1, 0]),
    )
    assert (list(one.calibrated), list(one.calibrated_trials), list(one.calibrated_accepted)) == (
        *([150, 40], [2, 1], [1, 0]),
    )
    assert list(other.cells) == [63 * 256 + 255]
    assert reports.take() is None


def test_acceptance_samples_are_bounded() -> None:
    counts = AcceptanceCounter()
    for i in range(40):
        counts.add(f"drafter {i}", [packed(p, own, 0, 0) for p in range(20) for own in range(256)])
    taken = counts.take()
    assert len(taken) == 32
    assert max(len(message.cells) for message in taken) == 4096
    assert counts.num_dropped == 8 * 5120 + 32 * (5120 - 4096)
    assert not counts


def test_a_profile_becomes_steps() -> None:
    reports = Reports(lambda: None)
    reports.profile(
        target_pb2.StepProfile(
            num_rows=[1, 5], num_sequences=[1, 1], num_context_tokens=[64, 64], step_us=[900, 1000]
        )
    )
    reports.profile(target_pb2.StepProfile(num_rows=[1]))
    frame = reports.take()
    assert frame is not None
    assert [(step.num_rows, step.num_context_tokens, step.step_us) for step in frame.steps] == [
        *((1, 64, 900), (5, 64, 1000)),
    ]
    assert reports.num_dropped == 1


def test_ended_requests_are_summed_by_tenant_and_bounded() -> None:
    reports = Reports(lambda: None)
    stats = generation_pb2.GenerationStats(
        num_generated_tokens=10, num_draft_tokens=8, num_accepted_tokens=5, decode_us=1000
    )
    for tenant in ("a", "a", *(f"t{i}" for i in range(80))):
        reports.ended(tenant, stats)
    frame = reports.take()
    assert frame is not None
    uses = {use.tenant: use for use in frame.tenants}
    assert len(uses) == 65
    assert (uses["a"].num_requests, uses["a"].num_tokens, uses["a"].num_accepted_tokens) == (2, 20, 10)
    assert uses["other"].num_requests == 80 - 63
    assert measurements_of(frame).tenants.count == 82
    assert reports.take() is None


def test_reports_count_the_drafter_in_the_verifiers_process() -> None:
    reports = Reports(lambda: None)
    commits = peer_pb2.CommitBatch(
        sequence_ids=[1, 2], epochs=[0, 0], starts=[1, 1], sizes=[1, 1], tokens=[1, 1]
    )
    step = target_pb2.StepReport(num_rows=2, step_us=100, colocated_draft_us=70, commits=commits)
    reports.step(step, [], num_running=2, draft_length=4)
    frame = reports.take()
    assert frame is not None
    assert [(d.num_draft_steps, d.num_sequences, d.draft_us) for d in frame.drafts] == [(4, 2, 70)]
