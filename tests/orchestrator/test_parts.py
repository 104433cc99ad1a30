"""The conductor's parts without a peer: commit log, states, policy, placement, admission, counting, frame merging."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.admission import Admission
from orchestrator.commit_log import CommitGapError, CommitLog
from orchestrator.counters import Counters, StatusCollector
from orchestrator.draft_acceptance import AcceptanceCounter
from orchestrator.draft_batches import join_drafts
from orchestrator.output_queue import Ending, OutputQueue
from orchestrator.placement import DrafterRequirement, check_drafter, choose_drafter, placement_in_force
from orchestrator.policy import PolicyInForce, PolicyOverrides
from orchestrator.ray_environment import prepare_environment
from orchestrator.reports import MAX_SAMPLES, Reports
from orchestrator.sequence_state import TRANSITIONS, ConductorSequenceState
from orchestrator.sequence_stats import SequenceStats, passes_per_position
from orchestrator.sequences import ConductorSequences, Sequence
from orchestrator.settings import OrchestratorSettings
from orchestrator.status import ConductorStatus
from orchestrator.step_report import acceptance_by_commit
from orchestrator.verifier_link import VerifierLink
from paceline.contract.errors import (
    CapacityError,
    IllegalTransitionError,
    IncompatiblePeerError,
    InvalidRequestError,
    StreamProtocolError,
    UnavailableError,
)
from paceline.v1 import drafter_pb2, generation_pb2, peer_pb2, sampling_pb2, scheduler_pb2, target_pb2
from services.scheduler.reports import measurements_of
from services.verifier.policy import StepPolicy
from tests.orchestrator.scripted_peers import log_probs_of, peer_info


def sequence(request_id: str = "r") -> Sequence:
    return Sequence(
        request_id=request_id,
        commit_log=CommitLog([1, 2]),
        sampling=sampling_pb2.SamplingParams(),
        max_new_tokens=4,
        stop_token_ids=(),
        max_draft_nodes=8,
        max_draft_tokens=8,
        started_at=0.0,
        pending_since=0.0,
    )


@given(
    text=st.lists(st.integers(0, 50), min_size=2, max_size=30),
    cuts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), max_size=20),
)
def test_a_commit_log_holds_a_prefix_of_the_text_whatever_is_repeated(
    text: list[int], cuts: list[tuple[int, int]]
) -> None:
    commit_log = CommitLog(text[:1])
    for start, size in cuts:
        span = text[start : start + size]
        known = len(commit_log.tokens)
        if start > known:
            with pytest.raises(CommitGapError):
                commit_log.append(start, span)
        else:
            new_tokens = commit_log.append(start, span)
            assert list(new_tokens) == text[known : known + len(new_tokens)]
        assert commit_log.tokens == text[: len(commit_log.tokens)]
        assert len(commit_log.tokens) >= known


def test_a_commit_log_counts_resumed_tokens_as_generated() -> None:
    commit_log = CommitLog([1, 2, 3, 4], num_resumed_tokens=2)
    assert (commit_log.num_prompt_tokens, commit_log.num_generated_tokens) == (2, 2)


def test_the_table_refuses_a_request_twice() -> None:
    sequences = ConductorSequences()
    sequences.add(sequence("r"))
    with pytest.raises(ValueError, match="running already"):
        sequences.add(sequence("r"))


@pytest.mark.parametrize("state", list(ConductorSequenceState))
def test_only_transitions_of_the_table_are_allowed(state: ConductorSequenceState) -> None:
    for target in ConductorSequenceState:
        subject = sequence()
        subject.state = state
        if target in TRANSITIONS[state]:
            subject.move_to(target)
            assert subject.state is target
        else:
            with pytest.raises(IllegalTransitionError):
                subject.move_to(target)


def test_table_forgets_old_keys_and_ids() -> None:
    sequences, subject = ConductorSequences(), sequence()
    sequences.add(subject)
    first = sequences.assign_key(subject)
    second = sequences.assign_key(subject)
    assert sequences.by_key(first) is None
    assert sequences.by_key(second) is subject
    sequences.assign_id(subject, 7)
    sequences.forget_id(subject)
    assert sequences.by_id(7) is None
    assert sequences.by_key(second) is None
    assert len(sequences) == 1
    sequences.remove(subject)
    assert len(sequences) == 0


@given(st.lists(st.integers(0, 9), max_size=40))
def test_passes_per_position_counts_those_that_reached_it(depths: list[int]) -> None:
    counts = passes_per_position(Counter(depths))
    assert counts == [sum(depth > position for depth in depths) for position in range(max(depths, default=0))]


def test_stats_leave_plain_passes_out_of_positions() -> None:
    stats = SequenceStats()
    stats.add(0, 0, 0)
    stats.add(5, 3, 1)
    assert (stats.num_passes, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 5, 1)
    assert passes_per_position(stats.depths) == [1, 1, 1]
    assert passes_per_position(stats.accepted) == [1]


def test_default_policy_drafts_and_holds_only_where_drafts_are_due() -> None:
    policy = PolicyInForce(PolicyOverrides())
    due = policy.verify_policy(is_colocated=False, is_drafter_due=True)
    alone = policy.verify_policy(is_colocated=False, is_drafter_due=False)
    assert due.wait_budget_us > 0
    assert alone.wait_budget_us == 0
    assert due.colocated_draft_length == 0
    assert policy.draft_plan().draft_length == 4


def test_overrides_stand_above_the_policy() -> None:
    policy = PolicyInForce(PolicyOverrides(draft_length=6, draft_ahead=1, wait_budget_us=7))
    policy.accept(
        scheduler_pb2.SpeculationPolicy(
            version=3, draft_length=2, wait_budget_us=900, max_nodes_per_sequence=2
        )
    )
    verify = policy.verify_policy(is_colocated=True, is_drafter_due=True)
    assert (verify.version, verify.wait_budget_us, verify.colocated_draft_length) == (3, 7, 6)
    assert verify.max_nodes_per_sequence == 6
    assert verify.max_nodes_per_step == 6
    plan = policy.draft_plan()
    assert (plan.version, plan.draft_length, plan.draft_ahead) == (3, 6, 1)


def test_policy_of_length_zero_turns_everything_off() -> None:
    policy = PolicyInForce(PolicyOverrides())
    policy.accept(
        scheduler_pb2.SpeculationPolicy(
            version=9, draft_length=0, wait_budget_us=900, draft_ahead=4, max_nodes_per_step=64
        )
    )
    verify = policy.verify_policy(is_colocated=False, is_drafter_due=True)
    assert (verify.max_nodes_per_step, verify.max_nodes_per_sequence, verify.wait_budget_us) == (0, 0, 0)
    assert (policy.draft_plan().draft_length, policy.draft_plan().draft_ahead) == (0, 0)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_plan_stays_within_the_frames_limits(length: int, ahead: int) -> None:
    policy = PolicyInForce(PolicyOverrides())
    policy.accept(scheduler_pb2.SpeculationPolicy(draft_length=length, draft_ahead=ahead))
    plan = policy.draft_plan()
    assert 0 <= plan.draft_length + plan.draft_ahead <= 64


@given(*(st.integers(0, 2**32 - 1) for _ in range(4)), st.booleans())
def test_no_policy_is_more_than_a_verifier_takes(
    length: int, nodes: int, per_step: int, wait_budget_us: int, is_colocated: bool
) -> None:
    """It would refuse the whole frame, and with it the stream."""
    policy = PolicyInForce(PolicyOverrides())
    policy.accept(
        scheduler_pb2.SpeculationPolicy(
            draft_length=length,
            max_nodes_per_sequence=nodes,
            max_nodes_per_step=per_step,
            wait_budget_us=wait_budget_us,
        )
    )
    told = policy.verify_policy(is_colocated=is_colocated, is_drafter_due=True)
    assert StepPolicy.from_proto(told).max_nodes_per_step == told.max_nodes_per_step


def test_placement_in_force() -> None:
    with_method, without = peer_info("verifier", method="eagle3"), peer_info("verifier")
    assert placement_in_force("auto", ["d:1"], with_method) == "separate"
    assert placement_in_force("auto", [], with_method) == "colocated"
    assert placement_in_force("auto", [], without) == "none"
    assert placement_in_force("auto", [], None) == "none"
    assert placement_in_force("none", ["d:1"], with_method) == "none"


class Drafter:
    def __init__(self, name: str, is_up: bool, is_stalled: bool, num_sequences: int) -> None:
        self.is_up, self.is_stalled, self.num_sequences = is_up, is_stalled, num_sequences
        self.endpoint = f"{name}:1"
        self.info: peer_pb2.PeerInfo | None = peer_info("drafter", drafter_name=name, method="eagle3")


def test_drafter_with_fewest_sequences_is_chosen_and_stalled_ones_last() -> None:
    down = Drafter("down", False, False, 0)
    stalled = Drafter("stalled", True, True, 0)
    busy = Drafter("busy", True, False, 5)
    idle = Drafter("idle", True, False, 2)
    assert choose_drafter([down, stalled, busy, idle]) is idle
    assert choose_drafter([down, stalled]) is stalled
    assert choose_drafter([down]) is None


@pytest.mark.parametrize("name", ["busy", "busy:1"])
def test_a_drafter_is_found_by_its_name_or_endpoint(name: str) -> None:
    busy, idle = Drafter("busy", True, False, 5), Drafter("idle", True, False, 2)
    assert choose_drafter([busy, idle], DrafterRequirement(name)) is busy
    assert choose_drafter([busy, idle], DrafterRequirement("eagle3")) is idle
    assert choose_drafter([busy, idle], DrafterRequirement("nobody")) is None
    busy.info = None
    assert (choose_drafter([busy, idle], DrafterRequirement(name)) is busy) == (name == "busy:1")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"protocol_version": 2}, "protocol version 2"),
        ({"model_fingerprint": "other"}, "model_fingerprint"),
        ({"tokenizer_fingerprint": "other"}, "tokenizer_fingerprint"),
        ({"vocab_size": 5}, "vocab_size"),
        ({"tap": peer_pb2.FeatureTap(layers=[1], width=8)}, "features"),
    ],
)
def test_incompatible_drafter_is_refused_naming_what_differs(changes: dict[str, object], match: str) -> None:
    with pytest.raises(IncompatiblePeerError, match=match):
        check_drafter(peer_info("drafter", **changes), peer_info("verifier"))


def test_drafter_without_features_suits_a_verifier_with_a_tap() -> None:
    check_drafter(peer_info("drafter"), peer_info("verifier", tap=peer_pb2.FeatureTap(layers=[1], width=8)))


def status(
    verifier: str, num_running: int = 0, is_ready: bool = True, max_positions: int = 100
) -> ConductorStatus:
    info = peer_info("verifier", max_positions=max_positions)
    return ConductorStatus(
        endpoint=f"conductor-of-{verifier}",
        verifier_endpoint=verifier,
        is_ready=is_ready,
        is_draining=False,
        num_running=num_running,
        placement="none",
        verifier=info.SerializeToString(),
        reason="" if is_ready else "scripted",
        counters=Counters(num_requests=3, finished=Counter({sampling_pb2.FINISH_REASON_STOP: 2})).as_dict(),
    )


def test_admission_spreads_requests_also_between_two_statuses() -> None:
    admission = Admission(max_sequences=4)
    admission.update(status("a", 1))
    admission.update(status("b", 0))
    assigned = Counter(admission.assign(1, 1) for _ in range(7))
    assert assigned == {"conductor-of-a": 3, "conductor-of-b": 4}
    with pytest.raises(CapacityError):
        admission.assign(1, 1)
    admission.update(status("a", 0))
    assert admission.assign(1, 1) == "conductor-of-a"


def test_admission_refuses_what_no_verifier_can_hold() -> None:
    admission = Admission(max_sequences=4)
    admission.update(status("a", 0, max_positions=50))
    admission.update(status("b", 3, max_positions=80))
    assert admission.assign(40, 20) == "conductor-of-b"
    with pytest.raises(InvalidRequestError, match="80"):
        admission.assign(60, 40)
    with pytest.raises(InvalidRequestError, match="num_prompt_tokens"):
        admission.assign(0, 1)


def test_admission_without_a_ready_conductor_says_why() -> None:
    admission = Admission(max_sequences=4)
    with pytest.raises(UnavailableError, match="no conductor has reported"):
        admission.assign(1, 1)
    admission.update(status("a", is_ready=False))
    with pytest.raises(UnavailableError, match="a: scripted"):
        admission.assign(1, 1)
    admission.update(status("a"))
    admission.assign(1, 1)
    admission.lose("a")
    with pytest.raises(UnavailableError):
        admission.assign(1, 1)


def test_statuses_become_metrics() -> None:
    families = {family.name: family for family in StatusCollector(lambda: [status("a", 2)]).collect()}
    assert families["paceline:conductor_requests"].samples[0].value == 3
    assert families["paceline:conductor_running_sequences"].samples[0].value == 2
    finished = families["paceline:conductor_finished_requests"].samples[0]
    assert (finished.labels, finished.value) == ({"verifier": "a", "reason": "stop"}, 2)


async def test_an_output_queue_merges_for_a_slow_reader_and_ends_once() -> None:
    output_queue = OutputQueue()
    output_queue.put_prompt(log_probs_of([7, 8], 1))
    output_queue.put([1], log_probs_of([1], 2))
    output_queue.wake()
    output_queue.put_prompt(log_probs_of([9], 1))
    output_queue.put([2, 3], log_probs_of([2, 3], 2))
    output_queue.end(Ending(sampling_pb2.FINISH_REASON_STOP))
    output_queue.end(Ending(sampling_pb2.FINISH_REASON_ERROR))
    output_queue.wake()
    output = await output_queue.take()
    tokens, ending = output.tokens, output.ending
    assert tokens == [1, 2, 3]
    assert output.log_probs == log_probs_of([1, 2, 3], 2)
    assert output.prompt_log_probs == log_probs_of([7, 8, 9], 1)
    assert ending is not None
    assert ending.finish_reason == sampling_pb2.FINISH_REASON_STOP
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await output_queue.take()


async def test_an_output_queue_with_an_interval_waits_for_enough() -> None:
    output_queue = OutputQueue(4)
    output_queue.put([1])
    output_queue.wake()
    assert (await output_queue.take()).tokens == [1]  # the first ones never wait
    for tokens in ([2], [3, 4]):
        output_queue.put(tokens)
        output_queue.wake()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await output_queue.take()
    output_queue.put([5, 6])
    output_queue.wake()
    assert (await output_queue.take()).tokens == [2, 3, 4, 5, 6]
    output_queue.put([7])
    output_queue.end(Ending(sampling_pb2.FINISH_REASON_STOP))  # nor does the end
    output_queue.wake()
    output = await output_queue.take()
    assert (output.tokens, output.ending is not None) == ([7], True)


def draft_batch(sequence_id: int, tokens: list[int], log_probs: list[float]) -> peer_pb2.DraftBatch:
    return peer_pb2.DraftBatch(
        sequence_ids=[sequence_id],
        epochs=[0],
        starts=[3],
        sizes=[len(tokens)],
        tokens=tokens,
        parents=range(-1, len(tokens) - 1),
        log_probs=log_probs,
    )


def test_merged_drafts_carry_log_probs_for_all_tokens_or_for_none() -> None:
    both = draft_batch(1, [4], [-0.5])
    join_drafts(both, draft_batch(2, [5, 6], [-1.0, -2.0]))
    assert list(both.sizes) == [1, 2]
    assert list(both.tokens) == [4, 5, 6]
    assert list(both.log_probs) == [-0.5, -1.0, -2.0]
    join_drafts(both, draft_batch(3, [7], []))
    assert list(both.tokens) == [4, 5, 6, 7]
    assert not both.log_probs
    join_drafts(both, more := draft_batch(4, [8], [-0.5]))
    assert not both.log_probs
    assert list(more.log_probs) == [-0.5]


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
    one, other = frame.outcomes
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


def test_acceptance_samples_of_a_step_are_checked() -> None:
    commits = peer_pb2.CommitBatch(sequence_ids=[1, 2])
    good = target_pb2.StepReport(commits=commits, num_acceptance_samples=[2, 0], acceptance_samples=[1, 2])
    assert acceptance_by_commit(good) == [[1, 2], []]
    assert acceptance_by_commit(target_pb2.StepReport(commits=commits)) == [[], []]
    for bad in (
        target_pb2.StepReport(commits=commits, num_acceptance_samples=[2], acceptance_samples=[1, 2]),
        target_pb2.StepReport(commits=commits, num_acceptance_samples=[1, 0], acceptance_samples=[1, 2]),
        target_pb2.StepReport(commits=commits, num_acceptance_samples=[1, 0], acceptance_samples=[1 << 23]),
    ):
        with pytest.raises(StreamProtocolError):
            acceptance_by_commit(bad)


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


def test_a_hello_brings_the_profile_and_only_a_fresh_one_counts() -> None:
    link = VerifierLink(
        "h:1",
        client_id="c",
        timing=OrchestratorSettings(verifiers=("h:1",)).timing(5.0),
        tls=None,
        clock=lambda: 0.0,
        num_running=lambda: 0,
    )
    info = peer_pb2.PeerInfo(instance_id="v")
    frame = target_pb2.VerifyResponse(hello=info, profile=target_pb2.StepProfile(num_rows=[1]))
    assert link.hello_of(frame) == info
    assert link.profile is not None
    assert list(link.profile.num_rows) == [1]
    link.profile = None
    assert link.hello_of(target_pb2.VerifyResponse(hello=info)) == info
    assert link.profile is None


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


@pytest.mark.parametrize(
    "changes",
    [
        {"verifiers": ()},
        {"verifiers": ("h:1", "h:1")},
        {"verifiers": ("nonsense",)},
        {"drafters": ("h:0",)},
        {"feature_endpoints": ("h:1", "h:2")},
        {"feature_endpoints": ("nonsense",)},
        {"draft_length": 65},
        {"wait_budget_us": -1},
        {"placement": "elsewhere"},
        {"unknown": 1},
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        OrchestratorSettings(**({"verifiers": ("h:1",)} | changes))  # type: ignore[arg-type]


def test_lists_of_endpoints_are_split_at_commas() -> None:
    settings = OrchestratorSettings(verifiers="a:1, b:2", drafters="c:3")  # type: ignore[arg-type]
    assert settings.verifiers == ("a:1", "b:2")
    assert settings.drafters == ("c:3",)


def test_embedded_ray_gets_a_token_of_its_own() -> None:
    first, second, joined = {"RAY_AUTH_TOKEN_PATH": "x"}, dict[str, str](), {"RAY_AUTH_MODE": "operator's"}
    prepare_environment(first, is_embedded=True)
    prepare_environment(second, is_embedded=True)
    prepare_environment(joined, is_embedded=False)
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert "RAY_AUTH_TOKEN_PATH" not in first
    assert joined == {"RAY_AUTH_MODE": "operator's", "RAY_USAGE_STATS_ENABLED": "0"}


def test_conductors_are_not_background_work_unless_the_operator_says_so() -> None:
    environ, chosen = dict[str, str](), {"RAY_worker_niceness": "5"}
    prepare_environment(environ, is_embedded=True)
    prepare_environment(chosen, is_embedded=True)
    assert environ["RAY_worker_niceness"] == "0"
    assert chosen["RAY_worker_niceness"] == "5"
